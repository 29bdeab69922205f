"""The benchmark over a slow link: its refusals, and where the machine lets it, a run and what it leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_link.sh"
TINY = ["--tokens", "64", "--pairs", "1", "--json"]
ROOT = os.geteuid() == 0


def start(*words, **changes):
    # Variables of a launcher would be those of another job.
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "RATE")}
    return subprocess.Popen(
        [shutil.which("bash"), str(SCRIPT), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | {"PYTHON": sys.executable} | changes,
    )


def finish(script):
    """Status, stdout and stderr of a script that has left no namespace behind."""
    out, err = script.communicate(timeout=200)
    if shutil.which("ip"):
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"slow_link_{script.pid}_" not in listed
    return script.returncode, out, err


def can_shape():
    """Whether this machine has what the script needs, tried in a namespace without a name."""
    if not ROOT or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return False
    probe = "ip link add veth0 type veth peer name veth1 && tc qdisc add dev veth0 root tbf rate 1gbit burst 80kb latency 50ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True).returncode == 0


def refused(script, *parts):
    """One sentence, and nothing where the numbers would be."""
    status, out, err = finish(script)
    assert status == 1 and out == ""
    assert err.startswith("slow_link.sh: needs ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err


def fake_tools(folder, refuses):
    """`ip` and `tc` that do nothing, and refuse whatever has a word in it."""
    for tool in ("ip", "tc"):
        path = folder / tool
        path.write_text(f'#!/bin/sh\ncase " $* " in *" {refuses} "*) echo "no {refuses} here" >&2; exit 2;; esac\n')
        path.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def test_without_iproute2_it_says_so():
    refused(start(*TINY, PATH="/nowhere"), "iproute2", "'ip'")


@pytest.mark.parametrize("word, what", [("netns", "network namespaces"), ("veth", "veth"), ("tbf", "tbf")])
def test_it_says_what_the_kernel_lacks_or_that_it_needs_root(tmp_path, word, what):
    script = start(*TINY, PATH=fake_tools(tmp_path, word))
    refused(script, *((what, f"no {word} here") if ROOT else ("root", f"user {os.geteuid()}")))


def test_a_tiny_run_or_a_refusal():
    if not can_shape():
        return refused(start(*TINY))
    status, out, err = finish(start(*TINY))
    assert status == 0, err
    found = json.loads(out)
    assert found["ranks"] == 2 and found["tokens"] == 64
    assert {"stock", "packed", "latent_kv"} <= {row["strategy"] for row in found["rows"]}
    assert "the link carries" in err


@pytest.mark.parametrize("fails, expected", [("0", 1), ("1", 1), ("none", 143)], ids=["rank 0", "rank 1", "ended"])
def test_nothing_stays_behind(tmp_path, fails, expected):
    """Neither of a rank that waits for one that fails, nor of a script that is told to end."""
    if not can_shape():
        return refused(start(*TINY))
    python = tmp_path / "python"
    # The link is measured as ever; a rank notes that it is there. One may fail then, the other would stay for long.
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n'
        f"cd {tmp_path}\necho $$ > rank$RANK\nuntil [ -s rank0 ] && [ -s rank1 ]; do sleep 0.1; done\n"
        f"[ $RANK = {fails} ] && exit 3\nexec sleep 300\n"
    )
    python.chmod(0o755)
    script = start(PYTHON=str(python))
    notes = [tmp_path / "rank0", tmp_path / "rank1"]
    while script.poll() is None and not all(note.exists() and note.read_text() for note in notes):
        time.sleep(0.05)
    if fails == "none":
        script.send_signal(signal.SIGTERM)
    status, _, err = finish(script)
    assert status == expected, err
    assert not any(Path("/proc", note.read_text().strip()).exists() for note in notes)
