"""The schema's own rules: the names that outside tools rely on, its shape, and its words."""

from __future__ import annotations

import importlib
import importlib.resources
import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor, MethodDescriptor

PROTO = Path(__file__).resolve().parents[2] / "proto"
MODULES: tuple[ModuleType, ...] = tuple(
    importlib.import_module(f"mlxstream.v1.{path.stem}_pb2") for path in sorted(PROTO.rglob("*.proto"))
)
FILES: tuple[FileDescriptor, ...] = tuple(module.DESCRIPTOR for module in MODULES)
MESSAGES: dict[str, Descriptor] = {name: one for file in FILES for name, one in file.message_types_by_name.items()}
ENUMS: dict[str, EnumDescriptor] = {name: one for file in FILES for name, one in file.enum_types_by_name.items()}
METHODS: list[MethodDescriptor] = [
    method for file in FILES for service in file.services_by_name.values() for method in service.methods
]

RPCS = {
    "GenerationService": ["Generate", "Complete", "Resume", "Abort"],
    "ModelService": ["GetModel", "ListModels", "Tokenize", "Detokenize", "RenderChat", "EstimateMemory"],
    "AdminService": [
        "LoadModel",
        "UnloadModel",
        "MountAdapter",
        "UnmountAdapter",
        "ListAdapters",
        "ListGenerations",
        "GetLoad",
        "ClearPrefixCache",
        "Drain",
    ],
}

RELIED_ON = {
    "GenerateRequest": "request_id model text tokens chat options delivery",
    "TextPrompt": "text",
    "TokenPrompt": "ids",
    "ChatPrompt": "messages tools add_generation_prompt enable_thinking template_variables",
    "ChatMessage": "role content",
    "ContentPart": "text image",
    "DeliveryOptions": (
        "max_tokens_per_message max_delay include_text include_token_bytes include_cache_tokens heartbeat_interval "
        "draft_blocks durable deadline_policy"
    ),
    "GenerateOptions": (
        "max_tokens eos_token_ids stop_sequences prefill_chunk_size temperature top_p top_k min_p min_tokens_to_keep "
        "xtc_probability xtc_threshold xtc_special_tokens seed hlg curve logit_bias repetition_penalty "
        "repetition_context_size presence_penalty presence_context_size frequency_penalty frequency_context_size "
        "logprobs top_logprobs adapters json_schema json_object regex grammar choice checkpoint_every_tokens "
        "cache_session_id cache speculation fill denoising"
    ),
    "TokenIds": "ids",
    "LogitBias": "token bias",
    "DenoisingOptions": (
        "max_denoising_steps min_canvas_length max_canvas_length full_canvas sampler threshold entropy_bound t_min "
        "t_max stability_threshold confidence_threshold"
    ),
    "GenerateResponse": "sequence started chunk block heartbeat finished",
    "TokenChunk": "tokens text",
    "GeneratedToken": "token index text_bytes logprobs",
    "Finished": "finish_reason matched_stop stats error",
    "ResumeRequest": "generation_id after_sequence",
}


def fields(message: Descriptor) -> list[FieldDescriptor]:
    return list(message.fields)


def test_the_modules_are_all_files_of_the_schema() -> None:
    assert {file.name for file in FILES} == {
        path.relative_to(PROTO).as_posix() for path in (PROTO / "mlxstream/v1").glob("*.proto")
    }


def test_services_offer_the_rpcs_of_the_design() -> None:
    found = {
        service.name: [method.name for method in service.methods]
        for file in FILES
        for service in file.services_by_name.values()
    }
    assert {name: found[name] for name in RPCS} == RPCS
    assert set(found) == set(RPCS)


@pytest.mark.parametrize("name", RELIED_ON)
def test_names_that_outside_tools_rely_on_are_there(name: str) -> None:
    assert [field.name for field in fields(MESSAGES[name])] == RELIED_ON[name].split()


def test_oneofs_are_those_of_the_design() -> None:
    oneofs = {
        (name, oneof.name): [field.name for field in oneof.fields]
        for name, message in MESSAGES.items()
        for oneof in message.oneofs
        if len(oneof.fields) > 1
    }
    assert oneofs[("GenerateRequest", "prompt")] == ["text", "tokens", "chat"]
    assert oneofs[("GenerateResponse", "event")] == ["started", "chunk", "block", "heartbeat", "finished"]
    assert oneofs[("ContentPart", "part")] == ["text", "image"]
    assert oneofs[("GenerateOptions", "constraint")] == ["json_schema", "json_object", "regex", "grammar", "choice"]


def test_scalar_options_tell_unset_from_zero() -> None:
    for name in ("GenerateOptions", "DenoisingOptions", "SpeculationOptions", "AdapterSelection"):
        singular = [field for field in fields(MESSAGES[name]) if not field.is_repeated and field.name != "id"]
        without = [field.name for field in singular if not field.has_presence and field.enum_type is None]
        assert without == [], name


def test_numbers_have_their_kinds() -> None:
    allowed = {
        FieldDescriptor.TYPE_DOUBLE,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
        FieldDescriptor.TYPE_BOOL,
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_BYTES,
        FieldDescriptor.TYPE_ENUM,
        FieldDescriptor.TYPE_MESSAGE,
    }
    assert {field.type for message in MESSAGES.values() for field in fields(message)} <= allowed
    for name in ("seed", "sequence", "after_sequence"):
        found = [field for message in MESSAGES.values() for field in fields(message) if field.name == name]
        assert found
        assert all(field.type == FieldDescriptor.TYPE_UINT64 for field in found)


@pytest.mark.parametrize("name", ENUMS)
def test_enums_are_prefixed_and_begin_unspecified(name: str) -> None:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
    assert ENUMS[name].values[0].name == f"{prefix}_UNSPECIFIED"
    assert ENUMS[name].values[0].number == 0
    assert all(value.name.startswith(f"{prefix}_") for value in ENUMS[name].values)


def test_lists_page() -> None:
    lists = [method for method in METHODS if method.name.startswith("List")]
    assert len(lists) == 3
    for method in lists:
        assert {"page_size", "page_token"} <= set(method.input_type.fields_by_name)
        assert "next_page_token" in method.output_type.fields_by_name


def test_only_resume_shares_its_messages_with_another_rpc() -> None:
    outputs = [method.output_type.name for method in METHODS]
    assert {name for name in outputs if outputs.count(name) > 1} == {"GenerateResponse"}
    assert [method.name for method in METHODS if method.output_type.name == "GenerateResponse"] == [
        "Generate",
        "Resume",
    ]
    inputs = [method.input_type.name for method in METHODS]
    assert len(set(inputs)) == len(inputs)


def test_every_definition_is_preceded_by_a_comment() -> None:
    definition = re.compile(r"^\s*(?:message|enum|service|rpc|oneof) \w+|^\s*[\w.<>, ]+ \w+ = \d+;")
    checked = 0
    for path in sorted((PROTO / "mlxstream/v1").glob("*.proto")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for above, line in itertools.pairwise(lines):
            if definition.match(line) and not line.startswith(("syntax", "import", "package", "option")):
                checked += 1
                assert above.lstrip().startswith("//"), f"{path.name}: {line.strip()}"
    assert checked > 350


def test_the_client_package_is_typed() -> None:
    assert importlib.resources.files("mlxstream").joinpath("py.typed").is_file()


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_no_field_hides_what_the_java_runtime_calls_by_the_same_name(message: Descriptor) -> None:
    hidden = {"class", "descriptor", "descriptor_for_type", "default_instance", "serialized_size", "unknown_fields"}
    assert not hidden & {field.name for field in message.fields}
