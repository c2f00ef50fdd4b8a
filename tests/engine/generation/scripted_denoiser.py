"""A denoising graph without weights, whose canvases settle towards a script, and rows that run over it.

Each position leans towards its scripted id, some more than others, and all the more the more of the canvas is right:
so a block takes several passes. What the graph was asked is recorded.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from engine.contracts.cancellation import AbortController
from engine.contracts.composition import Composition
from engine.contracts.graph import GraphDeclaration, GraphGeometry
from engine.contracts.option_groups import DenoisingOptions
from engine.contracts.options import ResolvedOptions
from engine.generation.bindings.denoising import bind_denoising_model
from engine.generation.denoising import dispatch_denoising_unit
from engine.generation.denoising_row import DenoisingRow
from engine.generation.denoising_schedule import plan_denoising
from engine.generation.row import RowFault
from engine.generation.stopping import StopRule
from engine.generation.text import PushedText

VOCAB, CANVAS, HIDDEN = 32, 8, 4
DECLARATION = GraphDeclaration(method="denoising", packed_segments=False)
GEOMETRY = GraphGeometry(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=4,
    context_length=256,
    layer_types=("full_attention",),
    canvas_length=CANVAS,
)
LEAST_LEAN, LEAN_STEP, GAIN = 2.0, 0.7, 6.0


@dataclass
class ScriptedState:
    """The ids that were encoded; the keys are a number for each."""

    tokens: list[int]
    prompt_tokens: int
    adapters: tuple
    closed: int = 0

    @property
    def offset(self):
        return len(self.tokens)

    @property
    def nbytes(self):
        return 4 * len(self.tokens)

    def arrays(self):
        return [mx.array(self.tokens)]

    def close(self):
        self.closed += 1


@dataclass
class ScriptedGraph:
    """Says `script` after any prompt. `calls` is what it was asked to do, with which `canvases`; it made `states`.

    `images` are where units with images began, and where in them the images did.
    """

    script: tuple[int, ...] = tuple(range(2, 30))
    calls: list[tuple] = field(default_factory=list)
    states: list[ScriptedState] = field(default_factory=list)
    canvases: list[tuple[int, ...]] = field(default_factory=list)
    images: list[tuple[int, int]] = field(default_factory=list)
    faults: int = 0
    not_a_number: bool = False
    graph_capabilities: GraphDeclaration = DECLARATION
    geometry: GraphGeometry = GEOMETRY
    composition: Composition | None = None
    model_type: str = "scripted_denoiser"
    eos_token_ids: tuple[int, ...] = (3,)
    weights_bytes: int = 1000
    experts: None = None
    adapters: None = None
    canvas_length: int = CANVAS
    embed_scale: float = 2.0
    closed: int = 0

    def prefill(self, tokens, adapters=(), images=()):
        self._note("prefill", tokens.shape[1])
        self.images += [(0, image.start) for image in images]
        self.states.append(ScriptedState(tokens[0].tolist(), tokens.shape[1], adapters))
        return self.states[-1]

    def extend_prefill(self, tokens, state, images=()):
        self._note("extend", tokens.shape[1], state.offset)
        self.images += [(state.offset, image.start) for image in images]
        state.tokens += tokens[0].tolist()

    def decoder_logits(self, canvas, state, feedback):
        self._note("pass", canvas.shape[1], state.offset, feedback is not None)
        length = canvas.shape[1]
        self.canvases.append(tuple(canvas[0].tolist()))
        places = [(state.offset + index) % len(self.script) for index in range(length)]
        target = mx.array([[self.script[place] for place in places]])
        right = mx.mean((canvas == target).astype(mx.float32))
        lean = mx.array([[LEAST_LEAN + LEAN_STEP * (place * 5 % 7) for place in places]]) + GAIN * right
        logits = lean[..., None] * (mx.arange(VOCAB) == target[..., None])
        return logits * mx.nan if self.not_a_number else logits

    def dequant_embed_weight(self):
        return mx.arange(VOCAB * HIDDEN, dtype=mx.float32).reshape(VOCAB, HIDDEN)

    def soft_embeddings(self, probabilities, table):
        return (probabilities @ table) * self.embed_scale

    def close(self):
        self.closed += 1

    def passes(self):
        """The passes among the calls."""
        return [call for call in self.calls if call[0] == "pass"]

    def said(self, prompt_tokens, tokens):
        """What the script says after so many tokens of prompt."""
        return [self.script[(prompt_tokens + index) % len(self.script)] for index in range(tokens)]

    def _note(self, *call):
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault of the device")
        self.calls.append(call)


class Letters:
    """Text of one letter for each id, with stop sequences; see `TextAssembler`."""

    def __init__(self, stops=()):
        self._rule = StopRule(stops)

    @property
    def matched_stop(self):
        return self._rule.matched_stop

    def push(self, token):
        letter = chr(ord("A") + token)
        text = self._rule.push(letter)
        return PushedText(token_bytes=letter.encode(), text=text, matched_stop=self.matched_stop)

    def finish(self):
        return self._rule.flush()


def letters(tokens):
    return "".join(chr(ord("A") + token) for token in tokens)


def options(**changes):
    """Resolved options, neutral but for `changes`."""
    values = {
        "max_tokens": 12,
        "eos_token_ids": (1,),
        "stop_sequences": (),
        "prefill_chunk_size": 64,
        "temperature": 0.0,
        "top_p": 0.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens_to_keep": 1,
        "seed": 7,
        "seed_was_explicit": True,
    }
    return ResolvedOptions(**(values | changes))


def make_row(
    prompt, *, canvas=CANVAS, stops=(), draft_blocks=False, clock=lambda: 0.0, denoising=None, images=(), **changes
):
    """A row, and the controller of its abort signal."""
    controller = AbortController()
    resolved = options(stop_sequences=tuple(stops), **changes)
    row = DenoisingRow(
        prompt=prompt,
        options=resolved,
        plan=plan_denoising(DenoisingOptions(**({"min_canvas_length": 1} | (denoising or {}))), canvas_length=canvas),
        signal=controller.signal,
        text=Letters(stops),
        submitted_at=0.0,
        clock=clock,
        draft_blocks=draft_blocks,
        images=images,
    )
    return row, controller


def advance(binding, row):
    """One unit of `row`; what the caller hears, and the end if there is one."""
    drawn = dispatch_denoising_unit(binding, row).read()
    if isinstance(drawn, RowFault):
        raise AssertionError(drawn.reason)
    return row.receive(drawn)


def run(graph, row):
    """Run `row` alone to its end; all events, and the end."""
    binding = bind_denoising_model(graph)
    row.admit([])
    told, finished = [], None
    while finished is None:
        events, finished = advance(binding, row)
        told += events
    row.close()
    return told, finished
