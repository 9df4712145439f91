from tasuki.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromDecode(_message.Message):
    __slots__ = ("hello", "want", "renew", "release", "batch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    want: Want
    renew: Renew
    release: Release
    batch: FromDecodeBatch
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., batch: _Optional[_Union[FromDecodeBatch, _Mapping]] = ...) -> None: ...

class FromPrefill(_message.Message):
    __slots__ = ("hello", "scheduled", "announce", "prefilled", "renewed", "gone", "batch", "digests")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    hello: HelloReply
    scheduled: Scheduled
    announce: Announce
    prefilled: Prefilled
    renewed: Renewed
    gone: Gone
    batch: FromPrefillBatch
    digests: Digests
    def __init__(self, hello: _Optional[_Union[HelloReply, _Mapping]] = ..., scheduled: _Optional[_Union[Scheduled, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ..., batch: _Optional[_Union[FromPrefillBatch, _Mapping]] = ..., digests: _Optional[_Union[Digests, _Mapping]] = ...) -> None: ...

class FromDecodeBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[FromDecode]
    def __init__(self, messages: _Optional[_Iterable[_Union[FromDecode, _Mapping]]] = ...) -> None: ...

class FromPrefillBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[FromPrefill]
    def __init__(self, messages: _Optional[_Iterable[_Union[FromPrefill, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "identity", "engine_id", "expected_engine_id", "digests")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    identity: bytes
    engine_id: str
    expected_engine_id: str
    digests: DigestRequest
    def __init__(self, protocol_version: _Optional[int] = ..., identity: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., expected_engine_id: _Optional[str] = ..., digests: _Optional[_Union[DigestRequest, _Mapping]] = ...) -> None: ...

class DigestRequest(_message.Message):
    __slots__ = ("block_size", "one_in")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ONE_IN_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    one_in: int
    def __init__(self, block_size: _Optional[int] = ..., one_in: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("engine_id", "refusal", "lease_s", "pools", "digests")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    refusal: str
    lease_s: float
    pools: _containers.RepeatedCompositeFieldContainer[RankPool]
    digests: bool
    def __init__(self, engine_id: _Optional[str] = ..., refusal: _Optional[str] = ..., lease_s: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[RankPool, _Mapping]]] = ..., digests: bool = ...) -> None: ...

class RankPool(_message.Message):
    __slots__ = ("layout", "transport_metadata", "transport_metadata_digest")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_METADATA_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_METADATA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    transport_metadata: bytes
    transport_metadata_digest: bytes
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., transport_metadata: _Optional[bytes] = ..., transport_metadata_digest: _Optional[bytes] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("block_size", "transport", "groups", "pool")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    transport: str
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    pool: Pool
    def __init__(self, block_size: _Optional[int] = ..., transport: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., pool: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("base_address", "block_bytes", "num_blocks", "device", "memory", "first_kv_head", "kv_heads")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    block_bytes: int
    num_blocks: int
    device: int
    memory: str
    first_kv_head: int
    kv_heads: int
    def __init__(self, base_address: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., device: _Optional[int] = ..., memory: _Optional[str] = ..., first_kv_head: _Optional[int] = ..., kv_heads: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("kind", "layers", "window", "state_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    window: int
    state_bytes: int
    def __init__(self, kind: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("request_id", "seq")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seq: int
    def __init__(self, request_id: _Optional[str] = ..., seq: _Optional[int] = ...) -> None: ...

class Scheduled(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("request_id", "first_token", "end_token", "groups", "heard")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_token: int
    end_token: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupBlocks]
    heard: int
    def __init__(self, request_id: _Optional[str] = ..., first_token: _Optional[int] = ..., end_token: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupBlocks, _Mapping]]] = ..., heard: _Optional[int] = ...) -> None: ...

class GroupBlocks(_message.Message):
    __slots__ = ("group", "first_token", "blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    first_token: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., first_token: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Digests(_message.Message):
    __slots__ = ("request_id", "first_token", "end_token", "groups")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_token: int
    end_token: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupDigests]
    def __init__(self, request_id: _Optional[str] = ..., first_token: _Optional[int] = ..., end_token: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupDigests, _Mapping]]] = ...) -> None: ...

class GroupDigests(_message.Message):
    __slots__ = ("group", "tokens", "values")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    group: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, group: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("request_id", "tokens", "first_tokens", "computed_s", "machine")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    computed_s: float
    machine: bytes
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., computed_s: _Optional[float] = ..., machine: _Optional[bytes] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token", "finished", "logprob")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token: int
    finished: bool
    logprob: _worker_pb2.TokenLogprob
    def __init__(self, choice: _Optional[int] = ..., token: _Optional[int] = ..., finished: bool = ..., logprob: _Optional[_Union[_worker_pb2.TokenLogprob, _Mapping]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("seq", "renewals")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    renewals: _containers.RepeatedCompositeFieldContainer[Renewal]
    def __init__(self, seq: _Optional[int] = ..., renewals: _Optional[_Iterable[_Union[Renewal, _Mapping]]] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("request_id", "scheduled", "announced_tokens", "prefilled", "digested_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    DIGESTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    scheduled: bool
    announced_tokens: int
    prefilled: bool
    digested_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., scheduled: bool = ..., announced_tokens: _Optional[int] = ..., prefilled: bool = ..., digested_tokens: _Optional[int] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("seq", "alive", "gone")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    alive: _containers.RepeatedScalarFieldContainer[str]
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seq: _Optional[int] = ..., alive: _Optional[_Iterable[str]] = ..., gone: _Optional[_Iterable[str]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_ids", "keep")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    keep: bool
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., keep: bool = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
