__version__ = "0.1.0"

#: What the tests run with; other versions work with a warning.
TESTED_VERSIONS = {
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "triton": "3.9.0",
}
