"""The codec decoder: latents to audio, with causal layers over [B, T, C] that stream exactly."""

from torch import Tensor

from sonoro.models.shared.latents import LatentDecoder
from sonoro.nn.causal import CausalConv1d, DepthwiseUpsample, FadeIn, name_layers
from sonoro.nn.elu import EluVocoder
from sonoro.nn.gelu import GeluWindowLayer
from sonoro.nn.history import Context
from sonoro.nn.window import WindowLayers

from .config import CodecConfig

_FADE_SAMPLES = 120  # A segment fades in: a codec without history begins with a click.


class CodecDecoder(LatentDecoder):
    """Latents to audio, `hop` samples each. `layout` is that of its `History`; `reach_frames` the receptive field of
    the state of `render`: less than a frame."""

    reach_frames = 1

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        net, windows = config.decoding
        self.patch, self.columns, self.hop = (1, config.quantizer.dimension), config.columns, config.hop
        self.output_proj = CausalConv1d(config.quantizer.dimension, windows.d_model, 1, bias=False)
        self.upsample = DepthwiseUpsample(windows.d_model, self.columns)
        self.layers = WindowLayers(windows.window, GeluWindowLayer)
        self.model = EluVocoder(net.dimension, net.n_filters, net.ratios, net.kernels, net.compress)
        self.fade = FadeIn(_FADE_SAMPLES)
        self.layout = name_layers(self)

    @property
    def weight(self) -> Tensor:
        return self.output_proj.conv.weight

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """`latents` [B, T, 1, D] through the transformer: the columns of each frame, [B, T, columns * width]."""
        x = self.upsample(self.output_proj(latents.flatten(2), history), history)
        return self.layers(x, history).unflatten(1, (-1, self.columns)).flatten(2)

    def render(self, x: Tensor, history: Context) -> Tensor:
        """The columns [B, T, columns * width] of frames to audio [B, T * hop]."""
        frames = x.shape[1]
        x = x.unflatten(2, (self.columns, -1)).flatten(1, 2)
        return self.fade(self.model(x, history), frames, history)
