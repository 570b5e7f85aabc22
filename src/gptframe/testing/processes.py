"""The check that needs two real processes: data parallelism as `trainer.strategy=ddp` runs it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from gptframe import plugins, registry
from gptframe.testing.kit import STREAM_KINDS, Failure, Skip, check
from gptframe.testing.subject import Harness, Subject, randomized, run, shape, weights_like

SECONDS = 60  # after which two processes that talk to each other are taken for stuck


@check(*STREAM_KINDS)
def two_processes(s: Subject) -> str:
    """data parallelism over two processes gives the gradients of one with both batches"""
    harness = randomized(s.build()).eval()
    if not any(p.requires_grad for p in harness.parameters()):
        raise Skip("no parameters")
    batches = [s.x(2, s.context, seed=rank) for rank in range(2)]
    wanted = _together(harness, batches)
    own = [s.file] if s.origin in registry.origins().values() else []
    for answer in _in_two_processes(harness, batches, own):
        if "unreachable" in answer:
            raise Skip(f"two processes cannot meet here: {answer['unreachable']}")
        if "error" in answer:
            raise Failure(
                f"in two processes: {answer['error']}",
                smallest=f"{shape(batches[0])} in each",
                cause="each parameter must take part in every forward, whatever the batch",
            )
        for name, norm in wanted.items():
            if abs(answer[name] - norm) > 1e-3 * max(norm, 1e-6):
                raise Failure(
                    f"in two processes the gradient of {name} has norm {answer[name]:.4g}, and {norm:.4g} in one",
                    smallest=f"{shape(batches[0])} in each",
                    cause="its use depends on the batch, or it is used outside forward",
                )
    return ""


def _together(harness: Harness, batches: list[Tensor]) -> dict[str, float]:
    """The norm of the mean gradient over the batches, by parameter name."""
    harness.zero_grad(set_to_none=True)
    for x in batches:
        y = run(harness, x)
        (y * weights_like(y)).sum().backward()
    return {n: float(p.grad.double().norm()) / 2 for n, p in harness.core.named_parameters() if p.grad is not None}


def _in_two_processes(harness: Harness, batches: list[Tensor], files: list[str]) -> list[dict[str, Any]]:
    """What each of two processes says: the norms of its gradients by name, or `error`, or `unreachable`."""
    harness.zero_grad(set_to_none=True)
    try:
        job = pickle.dumps((harness, batches))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise Skip(f"cannot be sent to another process, see `copies`: {error}") from None
    # A server that has imported torch and run nothing, and from which each process is forked in a moment. This process
    # itself cannot be forked: autograd may have started threads by now.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    make: Any = multiprocessing.get_context(method)
    make.set_forkserver_preload([__name__, "torch.nn.parallel.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(2):
            here, there = make.Pipe(duplex=False)
            arguments = (there, job, files, rank, f"file://{folder}/meeting")
            process = make.Process(target=_one_of_two, args=arguments, daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        answers = [_answer(here) for _, here in started]
        for process, _ in started:
            process.kill()
            process.join()
    return answers


def _answer(connection: Connection) -> dict[str, Any]:
    try:
        if connection.poll(SECONDS):
            return connection.recv()
    except EOFError:
        return {"error": "one process ended without an answer"}
    return {"error": "one process waits for the other without an end"}


def _one_of_two(connection: Connection, job: bytes, files: list[str], rank: int, meeting: str) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    connection.send(_parallel_gradients(job, files, rank, meeting))


def _parallel_gradients(job: bytes, files: list[str], rank: int, meeting: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    try:
        plugins.load([file for file in files if os.path.isfile(file)])
        harness, batches = pickle.loads(job)
        if os.path.isdir("/sys/class/net/lo"):  # a name that this machine cannot look up would stop gloo
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    except Exception as error:
        return {"unreachable": " ".join(str(error).split())[:200]}
    try:
        parallel: Any = DistributedDataParallel(harness)
        for _ in range(2):  # a parameter left out by the first pass is told by the second
            harness.zero_grad(set_to_none=True)
            y = run(parallel, batches[rank])
            (y * weights_like(y)).sum().backward()
        return {n: float(p.grad.double().norm()) for n, p in harness.core.named_parameters() if p.grad is not None}
    except Exception as error:
        return {"error": " ".join(str(error).split())[:200]}
