"""Hand-written networks in the styles that people write them: name -> function that builds."""

from __future__ import annotations

import torch
from building import Build, Inputs, network
from image_networks import (
    GAN,
    CapsuleNetwork,
    ConvMixer,
    DenseNet,
    DiffusionUNet,
    EfficientNet,
    MobileNet,
    SiameseNetwork,
    SpectralDiscriminator,
    UNet3d,
    VariationalAutoencoder,
)
from sequence_networks import (
    TCN,
    GraphNetwork,
    HandTransformer,
    MixtureOfExperts,
    NeuralODE,
    PackedRNN,
    PointNet,
    Recommender,
    Seq2Seq,
    TorchTransformer,
    TwoTower,
    WaveNet,
)


def _normal(*shape: int, batch: int = 2, growing: int | None = None) -> Inputs:
    """One positional tensor [batch, *shape]; the second has one row more.

    growing: the place in `shape` that is twice as large in the second.
    """

    def inputs(which: int) -> tuple[torch.Tensor]:
        sizes = [size * (1 + (which and place == growing)) for place, size in enumerate(shape)]
        return (torch.randn(batch + which, *sizes),)

    return inputs


def _diffusion(which: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = 2 + which
    edge = 16 * (1 + which)
    return torch.randn(batch, 3, edge, edge), torch.randint(0, 1000, (batch,))


def _graph(which: int) -> tuple[torch.Tensor, torch.Tensor]:
    nodes, edges = 12 + 5 * which, 30 + 11 * which
    return torch.randn(nodes, 16), torch.randint(0, nodes, (2, edges))


def _sequences(which: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length = 3 + which, 8 + 3 * which
    lengths = torch.randint(2, length + 1, (batch,))
    lengths[0] = length
    return torch.randn(batch, length, 12), lengths


def _clicks(which: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    batch = 5 + 3 * which
    indices = [torch.randint(0, 20, (batch * 3,)) for _ in range(12)]
    return torch.randn(batch, 4), indices, [torch.arange(0, batch * 3, 3) for _ in range(12)]


def _pairs(which: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2 + which, 3, 24, 24), torch.randn(2 + which, 3, 24, 24)


def _text(which: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = 2 + which
    return torch.randint(1, 40, (batch, 7 + which)), torch.randint(1, 40, (batch, 5 + which))


def _ids(which: int) -> tuple[torch.Tensor]:
    return (torch.randint(1, 40, (2 + which, 9 + which)),)


def _padded(which: int) -> dict[str, torch.Tensor]:
    batch, length = 2 + which, 8 + which
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[1, -3:] = True
    return {"x": torch.randn(batch, length, 32), "padding": padding}


NETWORKS: dict[str, Build] = {
    "capsules": network(CapsuleNetwork, _normal(1, 20, 20)),
    "convmixer": network(ConvMixer, _normal(3, 32, 32, growing=1)),
    "densenet": network(DenseNet, _normal(3, 32, 32, growing=2)),
    "diffusion_unet": network(DiffusionUNet, _diffusion),
    "efficientnet_hand": network(EfficientNet, _normal(3, 32, 32, growing=1)),
    "gan_generator": network(GAN, _normal(16)),
    "graph_network": network(GraphNetwork, _graph),
    "hand_transformer": network(HandTransformer, _ids),
    "mixture_of_experts": network(MixtureOfExperts, _normal(6, 24, growing=0)),
    "mobilenet_hand": network(MobileNet, _normal(3, 32, 32, growing=1)),
    "neural_ode": network(NeuralODE, _normal(6)),
    "packed_rnn": network(PackedRNN, _sequences),
    "pointnet": network(PointNet, _normal(3, 40, growing=1)),
    "recommender_tables": network(Recommender, _clicks),
    "seq2seq_lstm": network(Seq2Seq, _text),
    "siamese": network(SiameseNetwork, _pairs),
    "spectral_discriminator": network(SpectralDiscriminator, _normal(3, 32, 32)),
    "tcn": network(TCN, _normal(6, 24, growing=1)),
    "torch_transformer": network(TorchTransformer, _padded),
    "two_tower": network(TwoTower, _text),
    "unet3d": network(UNet3d, _normal(1, 16, 16, 16, growing=1)),
    "vae": network(VariationalAutoencoder, _normal(1, 28, 28)),
    "wavenet": network(WaveNet, _normal(1, 64, growing=1)),
}
