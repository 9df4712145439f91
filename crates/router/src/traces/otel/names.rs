//! Names of spans and attributes.
//!
//! Source of those that do not begin with `tasuki`: OpenTelemetry's semantic conventions, of
//! generative AI, HTTP and errors.

use crate::traces::PhaseName;

pub const SERVICE_VERSION: &str = "service.version";
pub const HTTP_REQUEST_METHOD: &str = "http.request.method";
pub const HTTP_ROUTE: &str = "http.route";
pub const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";
pub const ERROR_TYPE: &str = "error.type";
pub const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
pub const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
pub const GEN_AI_RESPONSE_ID: &str = "gen_ai.response.id";
pub const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// From the end of the request's body, in seconds.
pub const GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
pub const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
pub const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
pub const GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";

pub const PLACEMENT: &str = "tasuki.placement";

impl PhaseName {
    pub fn span(self) -> &'static str {
        match self {
            PhaseName::Tokenize => "tasuki.tokenize",
            PhaseName::Queue => "tasuki.queue",
        }
    }
}

/// Of a leg's first output.
pub const FIRST_OUTPUT: &str = "first_output";

/// `finished`, `failed`, `refused` or `disconnected`, as in the access log.
pub const OUTCOME: &str = "tasuki.outcome";
pub const TENANT: &str = "tasuki.tenant";
pub const REPLACEMENTS: &str = "tasuki.replacements";
pub const REQUEST_ID: &str = "tasuki.request.id";
pub const ATTEMPT: &str = "tasuki.attempt";
pub const WHY: &str = "tasuki.placement.why";
pub const RETRY_REASON: &str = "tasuki.retry.reason";
pub const RETRY_DETAIL: &str = "tasuki.retry.detail";
pub const WORKER: &str = "tasuki.worker.id";
pub const PROMPT_TOKENS: &str = "tasuki.leg.prompt_tokens";
pub const RESUMED_TOKENS: &str = "tasuki.leg.resumed_tokens";
pub const LEG_END: &str = "tasuki.leg.end";
pub const FAILURE: &str = "tasuki.failure.kind";
pub const TRANSFER_BYTES: &str = "tasuki.transfer_bytes";
pub const TRANSFER_DESCRIPTORS: &str = "tasuki.transfer_descriptors";
pub const TRANSPORT: &str = "tasuki.transport";
