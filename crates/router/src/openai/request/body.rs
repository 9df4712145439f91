//! From the bytes of a request to typed fields, with errors a person can use.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use futures::StreamExt;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::ApiError;

/// An oversized body is read (and thrown away) up to this many times the
/// limit, so that the client has sent all and sees the 413 and no reset.
const DISCARD_FACTOR: usize = 8;

/// Of bodies that would have to be unpacked first.
const COMPRESSIONS: [&str; 5] = ["gzip", "x-gzip", "deflate", "br", "zstd"];

/// Bodies of this size are always taken; larger ones share [`BodyLimits::budget`].
const FREE_BYTES: usize = 64 << 10;

/// What request bodies may cost.
#[derive(Debug)]
pub struct BodyLimits {
    /// Of one body.
    max_bytes: usize,
    /// From the headers to the body's last byte.
    timeout: Duration,
    /// Bytes of all bodies that are larger than [`FREE_BYTES`] and not yet worked up.
    budget: Arc<Semaphore>,
    budget_bytes: usize,
}

/// So many bodies of the largest size may be held at once.
const LARGEST_BODIES: usize = 32;

/// A whole body, and its part of the budget.
#[derive(Debug, Clone)]
pub struct Received {
    pub bytes: Bytes,
    _held: Option<Arc<OwnedSemaphorePermit>>,
}

impl BodyLimits {
    pub fn new(max_bytes: usize, timeout: Duration) -> Self {
        let budget_bytes = max_bytes
            .saturating_mul(LARGEST_BODIES)
            .min(Semaphore::MAX_PERMITS);
        Self {
            max_bytes,
            timeout,
            budget: Arc::new(Semaphore::new(budget_bytes)),
            budget_bytes,
        }
    }

    /// Reads a whole body.
    ///
    /// # Errors
    /// `TooLarge`, `SlowBody`, `Crowded` when other bodies take all the memory that there
    /// is for them, `Invalid` if the client breaks off.
    pub async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Received, ApiError> {
        let mut reading = Reading::default();
        let done = timeout(self.timeout, self.take(headers, body, &mut reading)).await;
        done.unwrap_or(Err(ApiError::SlowBody {
            received: reading.received,
            limit: self.timeout,
        }))?;
        Ok(Received {
            bytes: reading.kept.into(),
            _held: reading.held.map(Arc::new),
        })
    }

    async fn take(
        &self,
        headers: &HeaderMap,
        body: Body,
        reading: &mut Reading,
    ) -> Result<(), ApiError> {
        let limit = self.max_bytes;
        refuse_compressed(headers)?;
        let announced: Option<usize> = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse().ok());
        let discard_limit = limit.saturating_mul(DISCARD_FACTOR);
        if let Some(received) = announced.filter(|length| *length > discard_limit) {
            return Err(too_large(received.to_string(), limit));
        }
        let expected = announced.unwrap_or(0).min(limit).min(FREE_BYTES);
        reading.kept.reserve_exact(expected);
        let mut stream = body.into_data_stream();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk
                .map_err(|_| malformed("The request body could not be read to its end.".into()))?;
            reading.received += chunk.len();
            if reading.received > discard_limit {
                return Err(too_large(format!("more than {discard_limit}"), limit));
            }
            if reading.received > limit {
                *reading = Reading {
                    received: reading.received,
                    ..Reading::default()
                };
                continue;
            }
            if reading.received > FREE_BYTES {
                self.hold(chunk.len(), &mut reading.held)?;
            }
            reading.kept.extend_from_slice(&chunk);
        }
        if reading.received > limit {
            return Err(too_large(reading.received.to_string(), limit));
        }
        Ok(())
    }

    fn hold(&self, bytes: usize, held: &mut Option<OwnedSemaphorePermit>) -> Result<(), ApiError> {
        let wanted = u32::try_from(bytes).unwrap_or(u32::MAX);
        let more = Arc::clone(&self.budget)
            .try_acquire_many_owned(wanted)
            .map_err(|_| ApiError::Crowded {
                what: "Bytes of request bodies in memory:",
                used: self.budget_bytes - self.budget.available_permits(),
                limit: self.budget_bytes,
            })?;
        match held {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }
}

/// # Errors
/// `Invalid`: the body would be read as text, and be none.
fn refuse_compressed(headers: &HeaderMap) -> Result<(), ApiError> {
    let coding = headers.get(header::CONTENT_ENCODING);
    let coding = coding.and_then(|value| value.to_str().ok());
    let is_one = |name: &str| {
        let mut known = COMPRESSIONS.iter();
        known.any(|known| known.eq_ignore_ascii_case(name.trim()))
    };
    match coding.filter(|codings| codings.split(',').any(is_one)) {
        None => Ok(()),
        Some(coding) => Err(malformed(format!(
            "The request body has the Content-Encoding {coding}; send it uncompressed."
        ))),
    }
}

/// A body so far.
#[derive(Default)]
struct Reading {
    kept: Vec<u8>,
    received: usize,
    held: Option<OwnedSemaphorePermit>,
}

fn too_large(received: String, limit: usize) -> ApiError {
    ApiError::TooLarge { received, limit }
}

/// Takes the fields of `T` out of a JSON object; other fields are left alone.
///
/// # Errors
/// `Invalid`, naming the field and what was found in it.
pub fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ApiError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        malformed(format!(
            "The request body is not valid UTF-8: byte {} cannot stand there.",
            error.valid_up_to()
        ))
    })?;
    // A struct could be read from a list too; a request is an object.
    if !text.trim_start().starts_with('{') {
        return Err(malformed("The request body is not a JSON object.".into()));
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(explain)?;
    deserializer
        .end()
        .map_err(|error| malformed(format!("The request body is not valid JSON: {error}")))?;
    Ok(value)
}

fn explain(error: serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let path = error.path().to_string();
    let inner = error.into_inner();
    if inner.classify() != serde_json::error::Category::Data {
        return malformed(format!("The request body is not valid JSON: {inner}"));
    }
    if path == "." {
        return malformed(format!("The request body is not valid: {inner}"));
    }
    ApiError::Invalid {
        message: in_words(&path, &inner.to_string()),
        param: Some(path),
        code: Some("invalid_type"),
    }
}

/// What serde found in a field and what it expected, without the names of Rust's types.
fn in_words(path: &str, error: &str) -> String {
    let told = error.split(" at line ").next().unwrap_or(error);
    let kinds = ["invalid type: ", "invalid value: "];
    let mismatch = kinds.iter().find_map(|kind| told.strip_prefix(kind));
    let Some((found, expected)) = mismatch.and_then(|told| told.rsplit_once(", expected ")) else {
        return format!("{path}: {told}");
    };
    let (kind, value) = match found.split_once(' ') {
        Some((kind, value)) => (kind, value.rsplit('`').nth(1).unwrap_or(value)),
        None => (found, ""),
    };
    let found = match kind {
        "string" => format!("the string {value}"),
        "sequence" => "a list".to_owned(),
        "map" => "an object".to_owned(),
        "integer" | "floating" | "boolean" => value.to_owned(),
        _ => found.to_owned(),
    };
    let expected = match expected {
        "i64" => format!("a whole number from {} to {}", i64::MIN, i64::MAX),
        "u64" => format!("a whole number from 0 to {}", u64::MAX),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "f64" | "f32" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "an object".to_owned(),
        expected if expected.starts_with("struct ") => "an object".to_owned(),
        expected => expected.to_owned(),
    };
    format!("{path} is {found}, and must be {expected}")
}

fn malformed(message: String) -> ApiError {
    ApiError::Invalid {
        message,
        param: None,
        code: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Fields {
        n: Option<i64>,
    }

    #[track_caller]
    fn message(bytes: &[u8]) -> String {
        parse::<Fields>(bytes).unwrap_err().to_string()
    }

    #[test]
    fn ignores_fields_it_does_not_know() {
        assert_eq!(parse::<Fields>(br#"{"n":2,"x":[]}"#).unwrap().n, Some(2));
        assert_eq!(parse::<Fields>(br#"{"n":null}"#).unwrap().n, None);
    }

    #[test]
    fn names_the_field_and_the_value() {
        for (json, found) in [
            (
                r#"{"n":"two, expected 2"}"#,
                "the string \"two, expected 2\"",
            ),
            (r#"{"n":1.5}"#, "1.5"),
            (r#"{"n":99999999999999999999}"#, "1e+20"),
            (r#"{"n":true}"#, "true"),
            (r#"{"n":[1]}"#, "a list"),
            (r#"{"n":{}}"#, "an object"),
        ] {
            let limits = "from -9223372036854775808 to 9223372036854775807";
            let told = format!("n is {found}, and must be a whole number {limits}");
            assert_eq!(message(json.as_bytes()), told);
        }
        assert!(message(b"{\"n\":1").contains("not valid JSON"));
        assert!(message(b"{} {}").contains("not valid JSON"));
        assert!(message(b"[1]").contains("not a JSON object"));
        assert!(message(b"").contains("not a JSON object"));
        assert!(message(b"{\"n\":\"\xff\"}").contains("byte 6"));
    }

    const LONG: Duration = Duration::from_secs(20);

    async fn read(limits: &BodyLimits, body: Body) -> Result<Received, ApiError> {
        limits.read(&HeaderMap::new(), body).await
    }

    #[tokio::test]
    async fn reads_up_to_the_limit() {
        let limits = BodyLimits::new(8, LONG);
        let body = read(&limits, Body::from(vec![1; 8])).await.unwrap();
        assert_eq!(body.bytes.len(), 8);
        let error = read(&limits, Body::from(vec![1; 9])).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "The request body has 9 bytes, the limit is 8 bytes."
        );
        let error = read(&limits, Body::from(vec![1; 65])).await.unwrap_err();
        assert!(error.to_string().contains("more than 64"));
    }

    #[tokio::test]
    async fn a_compressed_body_is_refused_by_its_coding() {
        let limits = BodyLimits::new(1 << 10, LONG);
        for (coding, taken) in [
            ("gzip", false),
            ("GZip", false),
            ("identity, zstd", false),
            ("identity", true),
        ] {
            let value = axum::http::HeaderValue::from_static(coding);
            let headers = HeaderMap::from_iter([(header::CONTENT_ENCODING, value)]);
            match limits.read(&headers, Body::from("{}")).await {
                Ok(_) => assert!(taken, "{coding}"),
                Err(error) => {
                    let says = format!("the Content-Encoding {coding}; send it uncompressed");
                    assert!(!taken && error.to_string().contains(&says), "{error}");
                }
            }
        }
    }

    #[tokio::test]
    async fn a_body_that_trickles_in_is_given_up() {
        let drop_by_drop = futures::stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            Some((Ok::<_, std::io::Error>(Bytes::from(" ")), ()))
        });
        let limits = BodyLimits::new(1 << 20, Duration::from_millis(50));
        let read = timeout(LONG, read(&limits, Body::from_stream(drop_by_drop))).await;
        let error = read.expect("it ends").unwrap_err();
        assert_eq!(error.status(), axum::http::StatusCode::REQUEST_TIMEOUT);
        let text = error.to_string();
        assert!(
            text.contains("50ms") && text.contains("bytes had arrived"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn large_bodies_share_a_budget_and_give_it_back() {
        let limits = BodyLimits::new(FREE_BYTES + 1, LONG);
        let large = || read(&limits, Body::from(vec![b' '; FREE_BYTES + 1]));
        let mut held = Vec::new();
        let refused = loop {
            match large().await {
                Ok(body) => held.push(body),
                Err(error) => break error,
            }
        };
        assert_eq!(held.len(), LARGEST_BODIES);
        assert_eq!(
            refused.status(),
            axum::http::StatusCode::SERVICE_UNAVAILABLE
        );
        assert!(read(&limits, Body::from("small")).await.is_ok());
        held.pop();
        assert!(large().await.is_ok());
    }
}
