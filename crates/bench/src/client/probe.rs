//! Whether a server is ready, and what it calls its model.

use std::time::Duration;

use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout};

use super::exchange::Client;
use super::failure::{Failure, quote};
use super::target::Target;

/// Between two questions.
const AGAIN: Duration = Duration::from_millis(250);

/// Why a run cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error(
        "{address} is not ready after {waited_s:.0} s: {reason}; start the server, or wait longer \
         with --ready-timeout-s"
    )]
    NotReady {
        address: String,
        waited_s: f64,
        reason: String,
    },
    #[error(
        "{failure}; use http:// for a server without TLS, and SSL_CERT_FILE for a CA that the \
         system does not know"
    )]
    Tls { failure: Failure },
    #[error("{address} does not say what it serves ({reason}); {remedy}")]
    NoModel {
        address: String,
        reason: String,
        remedy: &'static str,
    },
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// Waits until the server says that it can serve, or has no such path.
///
/// # Errors
/// `NotReady` after `limit`; `Tls` at once, since no waiting mends it.
pub async fn wait_ready(
    client: &Client,
    target: &Target,
    limit: Duration,
) -> Result<(), ProbeError> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let reason = match timeout(left.max(AGAIN), client.get("/health")).await {
            Ok(Ok((status, _))) if status < 500 => return Ok(()),
            Ok(Ok((status, body))) => format!("HTTP {status}: {}", quote(&body)),
            Ok(Err(failure @ Failure::Tls { .. })) => return Err(ProbeError::Tls { failure }),
            Ok(Err(failure)) => failure.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        if Instant::now() + AGAIN >= deadline {
            return Err(ProbeError::NotReady {
                address: target.address(),
                waited_s: limit.as_secs_f64(),
                reason,
            });
        }
        sleep(AGAIN).await;
    }
}

/// The name of the first model that the server lists.
///
/// # Errors
/// `NoModel` if it lists none within `limit`.
pub async fn served_model(
    client: &Client,
    target: &Target,
    limit: Duration,
) -> Result<String, ProbeError> {
    let answer = timeout(limit, client.get("/v1/models")).await;
    let limit_s = limit.as_secs_f64();
    let answer = answer.unwrap_or(Err(Failure::Timeout { limit_s }));
    let remedy = match &answer {
        Ok((401 | 403, _)) => "give its key with --api-key",
        _ => "name the model with --model",
    };
    listed(answer).map_err(|reason| ProbeError::NoModel {
        address: target.address(),
        reason,
        remedy,
    })
}

fn listed(answer: Result<(u16, Vec<u8>), Failure>) -> Result<String, String> {
    let (status, body) = answer.map_err(|failure| failure.to_string())?;
    if status != 200 {
        return Err(format!("HTTP {status}: {}", quote(&body)));
    }
    let models: Models = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
    let first = models.data.into_iter().next();
    first
        .map(|model| model.id)
        .ok_or_else(|| "its list is empty".to_owned())
}
