from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_COLOCATED: _ClassVar[Leg]
    LEG_PREFILL: _ClassVar[Leg]
    LEG_DECODE: _ClassVar[Leg]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[FinishReason]
    FINISH_STOP: _ClassVar[FinishReason]
    FINISH_LENGTH: _ClassVar[FinishReason]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_CLIENT: _ClassVar[FailureKind]
    FAILURE_MODEL: _ClassVar[FailureKind]
    FAILURE_MEMORY: _ClassVar[FailureKind]
    FAILURE_DEVICE: _ClassVar[FailureKind]
    FAILURE_TRANSPORT: _ClassVar[FailureKind]
    FAILURE_OVERLOAD: _ClassVar[FailureKind]

class LegEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_END_UNSPECIFIED: _ClassVar[LegEndReason]
    LEG_END_FINISHED: _ClassVar[LegEndReason]
    LEG_END_HANDED_OFF: _ClassVar[LegEndReason]
    LEG_END_ABORTED: _ClassVar[LegEndReason]
    LEG_END_REFUSED: _ClassVar[LegEndReason]
    LEG_END_RETURNED: _ClassVar[LegEndReason]
    LEG_END_KV_LOST: _ClassVar[LegEndReason]
    LEG_END_REJECTED: _ClassVar[LegEndReason]
    LEG_END_FAILED: _ClassVar[LegEndReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role
LEG_UNSPECIFIED: Leg
LEG_COLOCATED: Leg
LEG_PREFILL: Leg
LEG_DECODE: Leg
FINISH_NONE: FinishReason
FINISH_STOP: FinishReason
FINISH_LENGTH: FinishReason
FAILURE_UNSPECIFIED: FailureKind
FAILURE_CLIENT: FailureKind
FAILURE_MODEL: FailureKind
FAILURE_MEMORY: FailureKind
FAILURE_DEVICE: FailureKind
FAILURE_TRANSPORT: FailureKind
FAILURE_OVERLOAD: FailureKind
LEG_END_UNSPECIFIED: LegEndReason
LEG_END_FINISHED: LegEndReason
LEG_END_HANDED_OFF: LegEndReason
LEG_END_ABORTED: LegEndReason
LEG_END_REFUSED: LegEndReason
LEG_END_RETURNED: LegEndReason
LEG_END_KV_LOST: LegEndReason
LEG_END_REJECTED: LegEndReason
LEG_END_FAILED: LegEndReason

class RouterMessage(_message.Message):
    __slots__ = ("submit", "abort", "retarget", "set_role", "resync_kv", "flush_cache")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RETARGET_FIELD_NUMBER: _ClassVar[int]
    SET_ROLE_FIELD_NUMBER: _ClassVar[int]
    RESYNC_KV_FIELD_NUMBER: _ClassVar[int]
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    retarget: Retarget
    set_role: RoleSetting
    resync_kv: KvResync
    flush_cache: FlushCache
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., retarget: _Optional[_Union[Retarget, _Mapping]] = ..., set_role: _Optional[_Union[RoleSetting, _Mapping]] = ..., resync_kv: _Optional[_Union[KvResync, _Mapping]] = ..., flush_cache: _Optional[_Union[FlushCache, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("info", "step")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    step: StepReport
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., step: _Optional[_Union[StepReport, _Mapping]] = ...) -> None: ...

class RoleSetting(_message.Message):
    __slots__ = ("role", "owner", "epoch")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    role: Role
    owner: str
    epoch: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("protocol_version", "engine_id", "model", "identity", "vocab_size", "max_model_len", "block_size", "num_blocks", "dtype", "kv_dtype", "tensor_parallel_size", "kv_endpoint", "version", "role", "device", "max_running_sequences", "max_batched_tokens", "kv_event_blocks")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    engine_id: str
    model: str
    identity: bytes
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    dtype: str
    kv_dtype: str
    tensor_parallel_size: int
    kv_endpoint: str
    version: str
    role: RoleSetting
    device: str
    max_running_sequences: int
    max_batched_tokens: int
    kv_event_blocks: int
    def __init__(self, protocol_version: _Optional[int] = ..., engine_id: _Optional[str] = ..., model: _Optional[str] = ..., identity: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., kv_endpoint: _Optional[str] = ..., version: _Optional[str] = ..., role: _Optional[_Union[RoleSetting, _Mapping]] = ..., device: _Optional[str] = ..., max_running_sequences: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ..., kv_event_blocks: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("engine_id", "kv_endpoint")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    kv_endpoint: str
    def __init__(self, engine_id: _Optional[str] = ..., kv_endpoint: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "leg", "peer", "prompt_tokens", "resumed_tokens", "choices", "sampling", "tenant", "number", "waited_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    leg: Leg
    peer: Peer
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    resumed_tokens: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    tenant: str
    number: int
    waited_s: float
    def __init__(self, request_id: _Optional[str] = ..., leg: _Optional[_Union[Leg, str]] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., resumed_tokens: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., number: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Retarget(_message.Message):
    __slots__ = ("request_id", "peer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    peer: Peer
    def __init__(self, request_id: _Optional[str] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "outputs", "ended", "load", "applied_submits", "kv")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SUBMITS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    ended: _containers.RepeatedCompositeFieldContainer[LegEnd]
    load: Load
    applied_submits: int
    kv: KvEvents
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[LegEnd, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., applied_submits: _Optional[int] = ..., kv: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("number", "reset", "stored", "dropped", "held")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    number: int
    reset: bool
    stored: _containers.RepeatedScalarFieldContainer[int]
    dropped: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., reset: bool = ..., stored: _Optional[_Iterable[int]] = ..., dropped: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class KvResync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "choice", "position", "tokens", "logprobs", "finish", "stop_token_id", "prompt_logprobs", "cached_prompt_tokens", "timings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish: FinishReason
    stop_token_id: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    cached_prompt_tokens: int
    timings: LegTimings
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., cached_prompt_tokens: _Optional[int] = ..., timings: _Optional[_Union[LegTimings, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob", "rank", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class LegEnd(_message.Message):
    __slots__ = ("request_id", "reason", "message", "timings", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: LegEndReason
    message: str
    timings: LegTimings
    failure: FailureKind
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[_Union[LegEndReason, str]] = ..., message: _Optional[str] = ..., timings: _Optional[_Union[LegTimings, _Mapping]] = ..., failure: _Optional[_Union[FailureKind, str]] = ...) -> None: ...

class LegTimings(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "handshake_s", "transfer_s", "transfer_exposed_s", "first_decode_s", "decode_s", "transfer_bytes", "transfer_blocks", "prefix_blocks", "transfer_tail_s", "transfer_post_s", "transfer_descriptors", "transport")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HANDSHAKE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_DECODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TAIL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_POST_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    handshake_s: float
    transfer_s: float
    transfer_exposed_s: float
    first_decode_s: float
    decode_s: float
    transfer_bytes: int
    transfer_blocks: int
    prefix_blocks: int
    transfer_tail_s: float
    transfer_post_s: float
    transfer_descriptors: int
    transport: str
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., handshake_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., transfer_exposed_s: _Optional[float] = ..., first_decode_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transfer_blocks: _Optional[int] = ..., prefix_blocks: _Optional[int] = ..., transfer_tail_s: _Optional[float] = ..., transfer_post_s: _Optional[float] = ..., transfer_descriptors: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("waiting_requests", "running_requests", "waiting_prefill_tokens", "free_blocks", "total_blocks", "leased_blocks", "quarantined_blocks", "prefill_tokens_per_s", "decode_step_s", "counters", "stuck_blocks", "running_sequences", "running_kv_tokens", "last_decode", "last_prefill", "waiting_sequences", "kv_pairs", "draining", "waiting_kv_tokens", "awaited_sequences", "planned_ahead_s")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    STUCK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_DECODE_FIELD_NUMBER: _ClassVar[int]
    LAST_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_PAIRS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    running_requests: int
    waiting_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    leased_blocks: int
    quarantined_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    counters: Counters
    stuck_blocks: int
    running_sequences: int
    running_kv_tokens: int
    last_decode: StepSample
    last_prefill: StepSample
    waiting_sequences: int
    kv_pairs: _containers.RepeatedCompositeFieldContainer[KvPair]
    draining: bool
    waiting_kv_tokens: int
    awaited_sequences: int
    planned_ahead_s: float
    def __init__(self, waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., stuck_blocks: _Optional[int] = ..., running_sequences: _Optional[int] = ..., running_kv_tokens: _Optional[int] = ..., last_decode: _Optional[_Union[StepSample, _Mapping]] = ..., last_prefill: _Optional[_Union[StepSample, _Mapping]] = ..., waiting_sequences: _Optional[int] = ..., kv_pairs: _Optional[_Iterable[_Union[KvPair, _Mapping]]] = ..., draining: bool = ..., waiting_kv_tokens: _Optional[int] = ..., awaited_sequences: _Optional[int] = ..., planned_ahead_s: _Optional[float] = ...) -> None: ...

class StepSample(_message.Message):
    __slots__ = ("number", "duration_s", "sequences", "kv_tokens", "prefill_tokens", "prefill_squares")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SQUARES_FIELD_NUMBER: _ClassVar[int]
    number: int
    duration_s: float
    sequences: int
    kv_tokens: int
    prefill_tokens: int
    prefill_squares: float
    def __init__(self, number: _Optional[int] = ..., duration_s: _Optional[float] = ..., sequences: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_squares: _Optional[float] = ...) -> None: ...

class KvPair(_message.Message):
    __slots__ = ("engine_id", "transport", "bytes", "pulls", "descriptors", "post_s", "wire_s", "exposed_s", "reconnects", "failures")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    POST_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    transport: str
    bytes: int
    pulls: int
    descriptors: int
    post_s: float
    wire_s: float
    exposed_s: float
    reconnects: int
    failures: _containers.RepeatedCompositeFieldContainer[KvFailure]
    def __init__(self, engine_id: _Optional[str] = ..., transport: _Optional[str] = ..., bytes: _Optional[int] = ..., pulls: _Optional[int] = ..., descriptors: _Optional[int] = ..., post_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., reconnects: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[KvFailure, _Mapping]]] = ...) -> None: ...

class KvFailure(_message.Message):
    __slots__ = ("cause", "count")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    cause: str
    count: int
    def __init__(self, cause: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("prompt_tokens_computed", "prompt_tokens_cached", "output_tokens", "steps", "preemptions", "kv_pulled_bytes", "kv_pulled_blocks", "kv_pulls", "kv_pull_failures", "leases_granted", "leases_expired", "kv_pull_timeouts", "kv_digests", "kv_digest_mismatches", "draft_tokens", "accepted_draft_tokens")
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_PULLS_FIELD_NUMBER: _ClassVar[int]
    KV_PULL_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LEASES_GRANTED_FIELD_NUMBER: _ClassVar[int]
    LEASES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    KV_PULL_TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    KV_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    KV_DIGEST_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    output_tokens: int
    steps: int
    preemptions: int
    kv_pulled_bytes: int
    kv_pulled_blocks: int
    kv_pulls: int
    kv_pull_failures: int
    leases_granted: int
    leases_expired: int
    kv_pull_timeouts: int
    kv_digests: int
    kv_digest_mismatches: int
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, prompt_tokens_computed: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., output_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., kv_pulled_bytes: _Optional[int] = ..., kv_pulled_blocks: _Optional[int] = ..., kv_pulls: _Optional[int] = ..., kv_pull_failures: _Optional[int] = ..., leases_granted: _Optional[int] = ..., leases_expired: _Optional[int] = ..., kv_pull_timeouts: _Optional[int] = ..., kv_digests: _Optional[int] = ..., kv_digest_mismatches: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...
