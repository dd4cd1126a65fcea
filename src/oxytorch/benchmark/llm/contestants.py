"""The contestants of `oxytorch llm bench`: oxytorch and the ways of running a model beside it.

The module of a contestant is imported when it is asked for. One that is not installed raises
`Absent` with the command that installs it; any other error is reported as a failure.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from oxytorch.benchmark.llm.task import Contestant, LlmTask


@dataclass(frozen=True)
class LlmPeer:
    """One contestant.

    name: the word of --peers.
    label: what tables call it.
    weights: the formats that it has.
    function: "module:name" of what makes it ready for a task.
    """

    name: str
    label: str
    weights: tuple[str, ...]
    function: str

    def prepare(self, task: LlmTask) -> Contestant:
        """The contestant, ready; raises `Absent` where it cannot take part."""
        module, _, name = self.function.partition(":")
        made: Contestant = getattr(importlib.import_module(module), name)(task)
        return made


_TORCH = "oxytorch.benchmark.peers.llm.in_torch"

PEERS = {
    peer.name: peer
    for peer in (
        LlmPeer("torch", "torch eager", ("bf16",), f"{_TORCH}:prepare_torch"),
        LlmPeer("compile", "torch.compile", ("bf16",), f"{_TORCH}:prepare_compile"),
        LlmPeer("torchao", "torchao", ("int8", "int4"), f"{_TORCH}:prepare_torchao"),
        LlmPeer(
            "llama.cpp",
            "llama.cpp",
            ("bf16", "int8", "int4"),
            "oxytorch.benchmark.peers.llm.llamacpp:prepare_llamacpp",
        ),
        LlmPeer(
            "openvino",
            "OpenVINO",
            ("bf16", "int8", "int4"),
            "oxytorch.benchmark.peers.llm.openvino:prepare_openvino",
        ),
        LlmPeer(
            "oxytorch",
            "oxytorch",
            ("bf16", "int8", "int4", "nf4", "fp8"),
            "oxytorch.benchmark.llm.ours:prepare_ours",
        ),
    )
}
"""Every contestant by name, in the order of the tables."""
