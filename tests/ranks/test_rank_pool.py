"""The pool itself: it passes results on, and it can fail."""

import os
import pickle
import re
import time

import pytest
import rank_pool
from rank_pool import RankError, raises_on_ranks, run_ranks

# Each of them ends ranks of a pool, whose start takes seconds.
pytestmark = pytest.mark.slow


def add(a, b):
    import torch
    import torch.distributed as dist

    total = torch.tensor([a + dist.get_rank()])
    dist.all_reduce(total)
    return int(total) + b


def environment():
    import torch

    return torch.get_num_threads(), os.environ["LOCAL_WORLD_SIZE"], os.environ["DS_ACCELERATOR"], os.getpid()


def draw():
    import torch

    return torch.rand(3).tolist()


def leave_mpu():
    import deepspeed

    before, deepspeed.utils.groups.mpu = deepspeed.utils.groups.mpu, "left behind"
    return before


def fail_on(ranks, message="as asked"):
    rank = int(os.environ["RANK"])
    if rank in ranks:
        raise ValueError(f"{message} on rank {rank}")
    return f"rank {rank} is fine"


def one_fails_the_other_waits():
    import torch
    import torch.distributed as dist

    fail_on([0])
    dist.all_reduce(torch.ones(1))


def die_on(rank):
    if int(os.environ["RANK"]) == rank:
        os._exit(3)


def hang_on(rank):
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def cannot_be_sent():
    return lambda: None


def works_again():
    assert run_ranks(2, add, 1, b=5) == [8, 8]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 0.5)


def test_results_come_in_rank_order_from_the_same_processes():
    works_again()
    first, second = run_ranks(2, environment), run_ranks(2, environment)
    assert first == second
    assert [row[:3] for row in first] == [(1, "2", "cpu")] * 2
    assert first[0][3] != first[1][3]


def test_each_call_starts_from_the_same_state():
    assert run_ranks(2, draw) == run_ranks(2, draw)
    assert run_ranks(2, leave_mpu) == run_ranks(2, leave_mpu) == [None, None]


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RankError) as caught:
        run_ranks(2, fail_on, [1])
    text = str(caught.value)
    assert "rank 0 of 2: returned 'rank 0 is fine'" in text
    assert re.search(r"rank 1 of 2: Traceback(.|\n)*in fail_on\n(.|\n)*ValueError: as asked on rank 1", text)
    works_again()


def test_peers_of_a_failed_rank_are_not_waited_for():
    start = time.monotonic()
    with pytest.raises(RankError, match="ValueError: as asked on rank 0"):
        run_ranks(2, one_fails_the_other_waits)
    assert time.monotonic() - start < 60  # the start of a pool, not the timeout
    works_again()


def test_a_rank_that_hangs_times_out_and_is_named():
    works_again()
    with pytest.raises(RankError, match=r"no answer after 1 s from ranks \[1\]\n--- rank 0 of 2: returned None"):
        run_ranks(2, hang_on, 1, timeout=1)
    works_again()


def abort_on(rank):
    if int(os.environ["RANK"]) == rank:
        os.write(2, b"last words")
        os.abort()


def test_what_a_rank_said_before_it_died_is_reported():
    with pytest.raises(RankError, match=r"exit code -6\n(.|\n)*last words(.|\n)*in abort_on"):
        run_ranks(2, abort_on, 1)
    works_again()


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match="rank 1 of 2: the process ended with exit code 3"):
        run_ranks(2, die_on, 1)
    works_again()


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RankError, match="the result cannot be sent"):
        run_ranks(2, cannot_be_sent)


def test_arguments_that_cannot_be_sent_reach_no_rank():
    before = run_ranks(2, environment)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        run_ranks(2, fail_on, lambda: None)
    assert run_ranks(2, environment) == before


def test_expected_failures_keep_the_pool():
    before = run_ranks(2, environment)
    raises_on_ranks(2, ValueError, r"asked on rank \d", fail_on, [0, 1])
    raises_on_ranks(2, Exception, "twice", fail_on, [0, 1], message="twice")
    assert run_ranks(2, environment) == before


@pytest.mark.parametrize(
    ("error", "match", "ranks"),
    [(ValueError, "as asked", [0]), (TypeError, "as asked", [0, 1]), (ValueError, "in fail_on", [0, 1])],
    ids=["one rank succeeds", "another type", "only in the traceback"],
)
def test_expecting_failure_can_fail(error, match, ranks):
    with pytest.raises(RankError, match="every rank has to raise"):
        raises_on_ranks(2, error, match, fail_on, ranks)
    works_again()
