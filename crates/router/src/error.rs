//! What can be wrong with a request, and the OpenAI error body that says so.
//!
//! Messages are for clients: they name the value and the limit, and never an
//! internal address.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use tasuki_core::{FailureKind, Retry};

use crate::serve::api::ServeError;

/// An answer other than success.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ApiError {
    /// 400: the client can mend it.
    #[error("{message}")]
    Invalid {
        message: String,
        /// The field at fault.
        param: Option<String>,
        code: Option<&'static str>,
    },
    /// 401: no API key, or one that is not valid.
    #[error("{message}")]
    Unauthorized { message: &'static str },
    /// 429: an API key has as many requests as it may.
    #[error(
        "{running} requests of this API key are running; its limit is {limit}. Try again in a \
         moment."
    )]
    KeyLimit { running: u32, limit: u32 },
    /// 404: a model that is not served here.
    #[error("The model `{requested}` does not exist. Served here: {served}.")]
    UnknownModel { requested: String, served: String },
    /// 404: a path that is not served here.
    #[error("There is no {path} here.{instead}")]
    UnknownPath {
        path: String,
        /// Empty, or a sentence after a space.
        instead: &'static str,
    },
    /// 404: the port of clients is open to a network.
    #[error(
        "/metrics is not served here, because --host is not a loopback address: give \
         --metrics-listen HOST:PORT and read them there."
    )]
    MetricsElsewhere,
    /// 404: likewise.
    #[error(
        "{path} is for operators and is not served here, because --host is not a loopback \
         address: send it to --admin-port."
    )]
    ForOperators { path: &'static str },
    /// 405.
    #[error("{method} is not allowed on {path}.")]
    Method { method: String, path: String },
    /// 413.
    #[error("The request body has {received} bytes, the limit is {limit} bytes.")]
    TooLarge { received: String, limit: usize },
    /// 408: the body did not arrive in time.
    #[error(
        "The request body was not complete after {limit:?}, the limit (--body-timeout-s); \
         {received} bytes had arrived."
    )]
    SlowBody { received: usize, limit: Duration },
    /// 503: as many sequences as allowed are running.
    #[error(
        "{running} sequences are running and this request has {asked}; the limit is {limit} \
         (--max-concurrent-requests). Try again in a moment."
    )]
    Busy {
        asked: usize,
        running: usize,
        limit: usize,
    },
    /// 503: other bodies take the memory or the processors.
    #[error("{what} {used}; the limit is {limit}. Try again in a moment.")]
    Crowded {
        what: &'static str,
        used: usize,
        limit: usize,
    },
    /// 503: as many connections as allowed are open.
    #[error(
        "{limit} connections are open, which is the limit (--max-connections). Try again in a \
         moment, and reuse connections."
    )]
    Connections { limit: usize },
    /// 504: it took too long.
    #[error(
        "The request was not finished after {limit:?}, the limit (--request-timeout-s). Ask for \
         fewer tokens."
    )]
    Deadline { limit: Duration },
    /// 503: shutting down.
    #[error("The server is shutting down and takes no new requests.")]
    Draining,
    /// 503: no worker can take it now.
    #[error("No worker can take the request: {reason}")]
    Unavailable { reason: String, retry_after_s: u32 },
    /// 503, or 429 for a tenant that has more than its share: it would wait for too long.
    #[error("The request would wait for too long: {reason}. Try again later.")]
    Overloaded {
        reason: String,
        retry_after_s: u32,
        over_share: bool,
    },
    /// 500: workers were tried and failed.
    #[error("{message}")]
    Attempts { kind: FailureKind, message: String },
    /// 500: our fault.
    #[error("{0}")]
    Failed(String),
}

/// How long a client is asked to wait when the server has too much to do.
const BUSY_RETRY_AFTER_S: u32 = 1;
/// Likewise by [`ApiError::Draining`]: about a restart.
const DRAINING_RETRY_AFTER_S: u32 = 10;

impl ApiError {
    /// A 400 about one field.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self::Invalid {
            message: message.into(),
            param: Some(param.to_owned()),
            code: None,
        }
    }

    /// A 400 about a field, or a value of one, that another server may take.
    pub fn unsupported(param: &str, message: impl Into<String>) -> Self {
        Self::Invalid {
            message: message.into(),
            param: Some(param.to_owned()),
            code: Some("unsupported_parameter"),
        }
    }

    /// The HTTP status of the answer.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthorized { .. } => StatusCode::UNAUTHORIZED,
            Self::UnknownModel { .. }
            | Self::UnknownPath { .. }
            | Self::MetricsElsewhere
            | Self::ForOperators { .. } => StatusCode::NOT_FOUND,
            Self::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::SlowBody { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::KeyLimit { .. }
            | Self::Overloaded {
                over_share: true, ..
            } => StatusCode::TOO_MANY_REQUESTS,
            Self::Overloaded { .. }
            | Self::Busy { .. }
            | Self::Crowded { .. }
            | Self::Connections { .. }
            | Self::Draining
            | Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Deadline { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Attempts { .. } | Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// For the access log: nothing that the client wrote.
    pub fn log_reason(&self) -> String {
        match self {
            Self::Invalid { code, .. } => code.unwrap_or("invalid_request").to_owned(),
            Self::UnknownModel { .. } => "model_not_found".to_owned(),
            Self::UnknownPath { .. } => "unknown_path".to_owned(),
            Self::Method { .. } => "method_not_allowed".to_owned(),
            _ => self.to_string(),
        }
    }

    /// Whether it may be given before the request's body was read: the connection cannot be used
    /// again then, and the client is to know.
    fn leaves_body_unread(&self) -> bool {
        matches!(
            self,
            Self::Unauthorized { .. }
                | Self::UnknownPath { .. }
                | Self::Method { .. }
                | Self::TooLarge { .. }
                | Self::SlowBody { .. }
                | Self::Connections { .. }
        )
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Busy { .. }
            | Self::Crowded { .. }
            | Self::Connections { .. }
            | Self::KeyLimit { .. } => Some(BUSY_RETRY_AFTER_S),
            Self::Draining => Some(DRAINING_RETRY_AFTER_S),
            Self::Unavailable { retry_after_s, .. } | Self::Overloaded { retry_after_s, .. } => {
                Some(*retry_after_s)
            }
            _ => None,
        }
    }

    /// What is at fault; `None`: a defect of the router.
    fn kind(&self) -> Option<FailureKind> {
        match self {
            Self::Attempts { kind, .. } => Some(*kind),
            Self::Failed(_) => None,
            Self::SlowBody { .. } => Some(FailureKind::Transport),
            Self::Deadline { .. } | Self::Overloaded { .. } | Self::KeyLimit { .. } => {
                Some(FailureKind::Overload)
            }
            _ if self.status() == StatusCode::SERVICE_UNAVAILABLE => Some(FailureKind::Overload),
            _ => Some(FailureKind::Client),
        }
    }

    /// The JSON of the answer, also the data of a stream's `error` event.
    pub fn body(&self) -> ErrorBody {
        let status = self.status();
        let (param, code) = match self {
            Self::Invalid { param, code, .. } => (param.clone(), *code),
            Self::Unauthorized { .. } => (None, Some("invalid_api_key")),
            Self::KeyLimit { .. } => (None, Some("key_limit")),
            Self::UnknownModel { .. } => (Some("model".to_owned()), Some("model_not_found")),
            Self::TooLarge { .. } => (None, Some("body_too_large")),
            Self::SlowBody { .. } => (None, Some("body_timeout")),
            Self::Busy { .. } | Self::Crowded { .. } => (None, Some("too_many_requests")),
            Self::Connections { .. } => (None, Some("too_many_connections")),
            Self::Deadline { .. } => (None, Some("request_timeout")),
            Self::Draining => (None, Some("shutting_down")),
            Self::Unavailable { .. } => (None, Some("no_worker")),
            Self::Overloaded {
                over_share: true, ..
            } => (None, Some("tenant_over_share")),
            Self::Overloaded { .. } => (None, Some("overloaded")),
            Self::Attempts { kind, .. } => (None, Some(kind.code())),
            _ => (None, None),
        };
        let kind = match status {
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::INTERNAL_SERVER_ERROR | StatusCode::GATEWAY_TIMEOUT => "server_error",
            _ => "invalid_request_error",
        };
        ErrorBody {
            error: ErrorDetail {
                message: self.to_string(),
                kind,
                param,
                code,
            },
        }
    }
}

/// `{"error": {...}}`, as OpenAI's clients expect it.
#[derive(Debug, Serialize)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Debug, Serialize)]
pub struct ErrorDetail {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if matches!(self, Self::Unauthorized { .. }) {
            let scheme = HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        if self.leaves_body_unread() {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
        }
        if let Some(seconds) = self.retry_after_s() {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        // OpenAI's clients retry every 5xx unless this says that a retry cannot help.
        if self.kind().is_some_and(|kind| kind.retry() != Retry::Again) {
            response
                .headers_mut()
                .insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<ServeError> for ApiError {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Unavailable {
                reason,
                retry_after_s,
            } => Self::Unavailable {
                reason,
                retry_after_s,
            },
            ServeError::Overloaded {
                reason,
                retry_after_s,
                over_share,
            } => Self::Overloaded {
                reason,
                retry_after_s,
                over_share,
            },
            ServeError::Rejected { message, param } => Self::Invalid {
                message,
                param: param.map(str::to_owned),
                code: None,
            },
            // Its request goes another way, see `foreign`.
            ServeError::Answered(_) => Self::Invalid {
                message: "The worker rejected the request.".to_owned(),
                param: None,
                code: None,
            },
            ServeError::Failed { kind, message } => Self::Attempts { kind, message },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_is_503_with_retry_after() {
        let response = ApiError::from(ServeError::Unavailable {
            reason: "no decode worker".into(),
            retry_after_s: 7,
        })
        .into_response();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "7");
    }

    #[test]
    fn the_body_has_the_shape_of_openai() {
        let body = ApiError::UnknownModel {
            requested: "gpt-9".into(),
            served: "a, b".into(),
        }
        .body();
        assert_eq!(
            serde_json::to_value(body).unwrap(),
            serde_json::json!({"error": {
                "message": "The model `gpt-9` does not exist. Served here: a, b.",
                "type": "invalid_request_error", "param": "model", "code": "model_not_found",
            }})
        );
    }
}
