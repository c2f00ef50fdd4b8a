"""Tiny DiffusionGemma models with a vision tower, images for them, and what mlx-vlm makes of both."""

import io

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4ImageProcessor
from PIL import Image

from engine.artifacts.artifact import open_artifact
from engine.artifacts.image_decoding import decode_image, open_image
from engine.artifacts.image_prompt import fitted_size
from engine.contracts.vision import PromptImage
from engine.generation.image_stretches import images_within
from tests.engine.generation.denoising_oracle import token_types
from tests.engine.models import tiny_diffusion

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "default_output_length": 6,
    "position_embedding_size": 16,
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32, "num_key_value_heads": 2}
"""Sizes of which each is a whole number of groups, but for those of a patch."""
BEGIN, IMAGE, END = 60, 61, 62
IDS = {"boi_token_id": BEGIN, "image_token_id": IMAGE, "eoi_token_id": END}
SHAPES = {
    "as published, but small": {"standardize": True},
    "keys shared by heads": {"num_key_value_heads": 1},
    "bounds around every product": {"use_clipped_linears": True},
    "heads of another size, a wide mean": {"head_dim": 20, "pooling_kernel_size": 3, "position_embedding_size": 18},
    "another rotation": {"rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}},
    "larger heads than there are kernels for": {"head_dim": 132, "num_hidden_layers": 1},
}
CLIPPED = 0.5


def build(changes=None, *, ids=None, **options):
    """A seeded model with a tower of `SIZES` and `changes`, whose tables, bounds and shifts are random too."""
    model = tiny_diffusion.build(vision=SIZES | (changes or {}), ids=ids or IDS, **options)
    tower = model.model.encoder.vision_tower
    mx.random.seed(11)
    table = tower.patch_embedder.position_embedding_table
    tower.patch_embedder.position_embedding_table = mx.random.normal(table.shape)
    bounds = [name for name, _ in tree_flatten(tower.parameters()) if name.endswith(("_min", "_max"))]
    signs = {name: -1 if name.endswith("_min") else 1 for name in bounds}
    tower.load_weights([(name, mx.array(CLIPPED * sign)) for name, sign in signs.items()], strict=False)
    mx.eval(model.parameters())
    return model


def save(folder, model, *, form=lambda tensors: tensors, vision=None, **document):
    """Write `model`; the tower is described by what it was built of, and by `vision` if that is given."""
    config = model.config.vision_config
    names = {*SIZES, "standardize", "use_clipped_linears", "rope_parameters"}
    described = {name: getattr(config, name) for name in sorted(names)} | (vision or {})
    ids = {name: getattr(model.config, name) for name in IDS}
    return tiny_diffusion.save(folder, model, form=form, vision_config=described, **ids, **document)


def picture(seed, width=24, height=16, mode="RGB"):
    """A seeded image of noise."""
    drawn = np.random.default_rng(seed)
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = drawn.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode=None if channels != 4 else mode)


def encoded(image, kind="PNG", **options):
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def processor(config):
    """mlx-vlm's own preparation of images."""
    return Gemma4ImageProcessor(
        patch_size=config.patch_size,
        max_soft_tokens=config.default_output_length,
        pooling_kernel_size=config.pooling_kernel_size,
    )


def pixels_of(model, images):
    """What mlx-vlm's tower is given for each of `images`, [3, H, W], and how many tokens each becomes."""
    found = [processor(model.config.vision_config)([image]) for image in images]
    return [mx.array(data["pixel_values"][0]) for data, _ in found], [tokens for _, (tokens,) in found]


def seen_by(model, image):
    """What mlx-vlm puts in the place of an image, [n, hidden]."""
    (pixels,), _ = pixels_of(model, [image])
    return model.model.encoder.get_image_features(pixels[None])[0]


def prompt_image(folder, image, start=0):
    """The same image as the product reads it for the model in `folder`."""
    geometry = open_artifact(folder).config.vision.geometry
    pixels = decode_image(open_image(encoded(image), "image"), lambda *size: fitted_size(geometry, *size))
    rows, columns = (side // geometry.token_pixels for side in pixels.shape[:2])
    return PromptImage(start=start, tokens=rows * columns, pixels=pixels)


def spliced(parts, tokens):
    """Ids of a prompt of `parts`, lists of ids, with an image of so many `tokens` between any two of them."""
    ids, starts = list(parts[0]), []
    for count, part in zip(tokens, parts[1:], strict=True):
        starts.append(len(ids) + 1)
        ids += [BEGIN, *[IMAGE] * count, END, *part]
    return ids, starts


def oracle_caches(model, ids, images):
    """mlx-vlm's caches after a prompt with `images`."""
    pixels, _ = pixels_of(model, images)
    return model.diffusion_prefill_cache(
        mx.array([ids]), cache=model.make_cache(), pixel_values=pixels, mm_token_type_ids=token_types(model, ids)
    )


def plain(part):
    """Ids of which none stands for an image."""
    return [token % BEGIN for token in part]


TEXTS = [plain(tiny_diffusion.ids(seed, length)) for seed, length in ((1, 5), (2, 3), (3, 6))]
"""What stands before, between and after two images."""


def read(folder, graph, images, *, cuts=()):
    """Ids and a state of `graph` that holds `TEXTS` with two images between them, read in units that end at `cuts`."""
    ids, starts = spliced(TEXTS, [prompt_image(folder, image).tokens for image in images])
    placed = [prompt_image(folder, image, start) for image, start in zip(images, starts, strict=True)]
    state, begin = None, 0
    for end in (*cuts, len(ids)):
        tokens = mx.array([ids[begin:end]])
        within = images_within(placed, begin, end)
        if state is None:
            state = graph.prefill(tokens, (), within)
        else:
            graph.extend_prefill(tokens, state, within)
        begin = end
    return ids, state
