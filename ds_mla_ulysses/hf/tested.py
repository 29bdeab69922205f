TESTED = ("llama",)
