"""OpenVINO's CPU plug-in on the same weights, with the cache as its state and nncf's formats.

The model is written in the form that OpenVINO's own exporters give it, which its plug-in fuses:
the cache is read, gathered by beam, joined with the new keys, and handed to its attention.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oxytorch.benchmark.core.contest import Absent, require
from oxytorch.benchmark.llm.task import Contestant, LlmTask, Stepwise

FAMILIES = ("llama", "mistral", "qwen3")
"""model_type of transformers whose layers `_Traceable` knows."""


class _Traceable(nn.Module):
    """A Llama without branches: logits of the last token, and the new cache.

    past: for each layer keys and values [batch, kv_heads, seen, head_dim].
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, *past: Tensor) -> list[Tensor]:
        body = self.model.model
        hidden = body.embed_tokens(input_ids)
        cos, sin = (part[:, None] for part in body.rotary_emb(hidden, position_ids))
        seen = torch.arange(past[0].shape[2] + input_ids.shape[1])
        allowed = seen[None, :] <= position_ids[0][:, None]
        mask = torch.where(allowed, 0.0, -65504.0)[None, None]
        present = []
        for layer, keys, values in zip(body.layers, past[::2], past[1::2], strict=True):
            attended, keys, values = self._attention(
                layer.self_attn, layer.input_layernorm(hidden), keys, values, cos, sin, mask
            )
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            present += [keys, values]
        return [self.model.lm_head(body.norm(hidden[:, -1:])), *present]

    def _attention(
        self,
        module: Any,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, module.head_dim).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = (part * cos + _half_turned(part) * sin for part in (query, key))
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        each = query.shape[1] // keys.shape[1]
        wide_keys, wide_values = (
            part[:, :, None]
            .expand(batch, part.shape[1], each, part.shape[2], module.head_dim)
            .reshape(batch, part.shape[1] * each, part.shape[2], module.head_dim)
            for part in (keys, values)
        )
        found = F.scaled_dot_product_attention(query, wide_keys, wide_values, mask)
        joined = found.transpose(1, 2).reshape(batch, length, -1)
        return module.o_proj(joined), keys, values


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def prepare_openvino(task: LlmTask) -> Contestant:
    """The model converted, its weights compressed by nncf, compiled for latency."""
    os.environ.setdefault("OPENVINO_TELEMETRY_OPT_OUT", "1")
    openvino = require("openvino", "pip install openvino")
    if task.weights != "bf16":
        require("nncf", "pip install nncf")
    name = f"{task.shape or Path(task.folder).name}-openvino-{task.weights}-{task.group_size}.xml"
    path = task.work / name
    if not path.exists():
        task.progress("", "build")
        model: Any = task.build().float()
        if model.config.model_type not in FAMILIES:
            raise Absent(f"a {model.config.model_type} is not converted to OpenVINO here")
        task.progress("", "convert")
        converted = converted_model(openvino, model)
        _compress(converted, task)
        task.progress("", "save")
        unfinished = path.with_name(f"unfinished-{path.name}")
        openvino.save_model(converted, str(unfinished))
        unfinished.with_suffix(".bin").rename(path.with_suffix(".bin"))
        unfinished.rename(path)
        del model, converted
    task.progress("", "compile")
    compiled = openvino.Core().compile_model(
        str(path),
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": task.threads,
        },
    )
    return _contestant(compiled, path)


@torch.no_grad()
def converted_model(openvino: Any, model: Any) -> Any:
    """A float32 model of transformers as an OpenVINO model whose cache is its state."""
    config = model.config
    head_dim = model.model.layers[0].self_attn.head_dim
    count = 2 * config.num_hidden_layers
    ids, positions = torch.ones(1, 3, dtype=torch.int64), torch.arange(2, 5)[None]
    past = [torch.zeros(1, config.num_key_value_heads, 2, head_dim) for _ in range(count)]
    converted = openvino.convert_model(_Traceable(model), example_input=(ids, positions, *past))
    any_size = openvino.Dimension()
    shapes = [[1, any_size], [1, any_size]]
    shapes += [[1, config.num_key_value_heads, any_size, head_dim]] * count
    names = ["input_ids", "position_ids", *(f"past.{index}" for index in range(count))]
    for port, name, shape in zip(converted.inputs, names, shapes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for index, port in enumerate(converted.outputs):
        port.get_tensor().set_names({"logits" if index == 0 else f"present.{index - 1}"})
    converted.validate_nodes_and_infer_types()
    _gather_by_beam(openvino, converted)
    stateful = importlib.import_module("openvino._offline_transformations")
    stateful.apply_make_stateful_transformation(
        converted, {f"past.{index}": f"present.{index}" for index in range(count)}
    )
    _begin_empty(openvino, converted)
    return converted


def _gather_by_beam(openvino: Any, converted: Any) -> None:
    """Puts a choice of beams behind each cache, without which the plug-in does not fuse it."""
    operators = importlib.import_module("openvino.opset13")
    beams = operators.parameter([openvino.Dimension()], openvino.Type.i32, "beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    for port in converted.inputs[2:]:
        consumers = port.get_target_inputs()
        gathered = operators.gather(
            port.get_node(), beams, operators.constant(0, openvino.Type.i64)
        )
        for consumer in consumers:
            consumer.replace_source_output(gathered.output(0))
    converted.add_parameters([beams])
    converted.validate_nodes_and_infer_types()


def _begin_empty(openvino: Any, converted: Any) -> None:
    """Makes every state begin without tokens."""
    operators = importlib.import_module("openvino.opset13")
    for node in converted.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = [length.get_min_length() for length in node.get_output_partial_shape(0)]
            zero = operators.constant(0.0, node.get_output_element_type(0))
            lengths = operators.constant(shape, openvino.Type.i64)
            node.set_arguments([operators.broadcast(zero, lengths)])
    converted.validate_nodes_and_infer_types()


def _compress(converted: Any, task: LlmTask) -> None:
    """Weights in int8 per channel, or int4 with groups, everywhere, as llama.cpp's and ours."""
    if task.weights == "bf16":
        return
    task.progress("", f"compress to {task.weights}")
    nncf: Any = importlib.import_module("nncf")
    if task.weights == "int8":
        nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_SYM)
        return
    nncf.compress_weights(
        converted,
        mode=nncf.CompressWeightsMode.INT4_SYM,
        group_size=task.group_size,
        ratio=1.0,
        all_layers=True,
    )


def _contestant(compiled: Any, path: Path) -> Stepwise:
    import numpy

    request = compiled.create_infer_request()
    latest: dict[str, Any] = {}
    seen = 0
    beams = numpy.zeros(1, dtype=numpy.int32)

    def run(tokens: Any) -> int:
        nonlocal seen
        positions = numpy.arange(seen, seen + tokens.shape[1], dtype=numpy.int64)[None]
        seen += tokens.shape[1]
        request.infer(
            {"input_ids": tokens, "position_ids": positions, "beam_idx": beams}, share_inputs=True
        )
        latest["logits"] = request.get_tensor("logits").data[0, -1]
        return int(latest["logits"].argmax())

    def start(ids: Tensor) -> int:
        nonlocal seen
        request.reset_state()
        seen = 0
        return run(ids.numpy())

    def step(token: int) -> int:
        return run(numpy.array([[token]], dtype=numpy.int64))

    def last() -> Tensor:
        return torch.from_numpy(latest["logits"].astype("float32"))

    vocabulary = int(compiled.output("logits").get_partial_shape()[2].get_length())
    notes: dict[str, object] = {"file_bytes": path.with_suffix(".bin").stat().st_size}
    return Stepwise(vocabulary, start, step, last, notes=notes)
