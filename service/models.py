"""ModelService: what is served, and its text layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contracts.errors import InvalidRequestError, NotFoundError
from engine.contracts.memory import MemoryLoad
from mlxstream.v1 import model_pb2
from service.decode import decode_chat, decode_model
from service.decode_values import require_few
from service.encode_model import encode_memory_estimate, encode_model_info, encode_model_summary
from service.revision import MINIMUM_CLIENT_REVISION, SCHEMA_REVISION, server_version
from service.rpc import off_loop_if_large

if TYPE_CHECKING:
    from engine.contracts.model import ModelInfo
    from engine.execution.engine import Engine
    from service.rpc import Context, Handler


class ModelHandlers:
    """Answers `mlxstream.v1.ModelService`."""

    def __init__(self, engine: Engine) -> None:
        """Tells about the model of `engine`."""
        self._engine = engine

    def by_name(self) -> dict[str, Handler]:
        """Handlers by RPC; the others are refused."""
        return {
            "GetModel": self.get_model,
            "ListModels": self.list_models,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "RenderChat": self.render_chat,
            "EstimateMemory": self.estimate_memory,
        }

    async def get_model(self, request: model_pb2.GetModelRequest, _context: Context) -> model_pb2.GetModelResponse:
        """Describe the model and this build."""
        return model_pb2.GetModelResponse(
            model=encode_model_info(self._model(request.model)),
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            server_version=server_version(),
        )

    async def list_models(
        self, request: model_pb2.ListModelsRequest, _context: Context
    ) -> model_pb2.ListModelsResponse:
        """List the one model that is served, on one page."""
        if request.page_token:
            raise InvalidRequestError.of("page_token", "is not one that this server has given")
        return model_pb2.ListModelsResponse(models=[encode_model_summary(self._model(""))])

    async def tokenize(self, request: model_pb2.TokenizeRequest, _context: Context) -> model_pb2.TokenizeResponse:
        """Text to ids."""
        model = self._model(request.model)
        ids = await self._engine.tokenize(
            request.text,
            model=model.name,
            add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
            parse_special_tokens=request.parse_special_tokens if request.HasField("parse_special_tokens") else True,
        )
        return model_pb2.TokenizeResponse(ids=ids, model=model.name)

    async def detokenize(self, request: model_pb2.DetokenizeRequest, _context: Context) -> model_pb2.DetokenizeResponse:
        """Ids to text."""
        model = self._model(request.model)
        await off_loop_if_large(request, _require_known_ids, request, model.geometry.vocab_size)
        text = await self._engine.detokenize(
            request.ids,
            model=model.name,
            skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        )
        return model_pb2.DetokenizeResponse(text=text, model=model.name)

    async def render_chat(
        self, request: model_pb2.RenderChatRequest, _context: Context
    ) -> model_pb2.RenderChatResponse:
        """Conversation to prompt."""
        model = self._model(request.model)
        chat = await off_loop_if_large(request, decode_chat, request.chat)
        text, ids = await self._engine.render_chat(chat, model=model.name)
        return model_pb2.RenderChatResponse(text=text, ids=ids, model=model.name)

    async def estimate_memory(
        self, request: model_pb2.EstimateMemoryRequest, _context: Context
    ) -> model_pb2.EstimateMemoryResponse:
        """The memory that a load of the served model would take."""
        model = self._model(request.model)
        rows = request.rows if request.HasField("rows") else 1
        if not rows:
            raise InvalidRequestError.of("rows", "must be at least 1")
        load = MemoryLoad(
            prompt_tokens=request.prompt_tokens, max_tokens=request.max_tokens, rows=rows, images=request.images
        )
        return encode_memory_estimate(self._engine.estimate_memory(load, model=model.name))

    def _model(self, name: str) -> ModelInfo:
        """The served model; another name is not found."""
        model = self._engine.model
        if decode_model(name) not in ("", model.name):
            raise NotFoundError("model", name, (model.name,))
        return model


def _require_known_ids(request: model_pb2.DetokenizeRequest, vocab_size: int) -> None:
    require_few(request, "ids", "ids")
    for position, token in enumerate(request.ids):
        if token >= vocab_size:
            raise InvalidRequestError.of(
                f"ids[{position}]", f"token id {token} is outside the vocabulary of {vocab_size}"
            )
