//! From the bytes of a request to typed fields, with errors a person can use.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use futures::StreamExt;
use serde::Deserialize;
use tokio::time::timeout;

use crate::error::ApiError;

/// An oversized body is read (and thrown away) up to this many times the
/// limit, so that the client has sent all and sees the 413 and no reset.
const DISCARD_FACTOR: usize = 8;

/// A client that stops in the middle of its body must not keep its place for ever.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Reads a whole body of at most `limit` bytes.
///
/// # Errors
/// [`ApiError::TooLarge`] above the limit; `Invalid` if the client breaks off or stalls.
pub async fn read(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    read_within(headers, body, limit, LONGEST_PAUSE).await
}

async fn read_within(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    longest_pause: Duration,
) -> Result<Bytes, ApiError> {
    let announced: Option<usize> = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let discard_limit = limit.saturating_mul(DISCARD_FACTOR);
    if let Some(received) = announced.filter(|length| *length > discard_limit) {
        return Err(too_large(received.to_string(), limit));
    }
    let mut stream = body.into_data_stream();
    let mut kept = Vec::with_capacity(announced.unwrap_or(0).min(limit));
    let mut received = 0;
    loop {
        let chunk = match timeout(longest_pause, stream.next()).await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => break,
            Err(_) => {
                return Err(malformed(format!(
                    "Nothing came of the request body for {longest_pause:?}, the limit; \
                     {received} bytes had come."
                )));
            }
        };
        let chunk = chunk.map_err(|_| ApiError::Invalid {
            message: "The request body could not be read to its end.".to_owned(),
            param: None,
            code: None,
        })?;
        received += chunk.len();
        if received > discard_limit {
            return Err(too_large(format!("more than {discard_limit}"), limit));
        }
        if received <= limit {
            kept.extend_from_slice(&chunk);
        } else {
            kept = Vec::new();
        }
    }
    if received > limit {
        return Err(too_large(received.to_string(), limit));
    }
    Ok(kept.into())
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
        message: format!("{path}: {inner}"),
        param: Some(path),
        code: Some("invalid_type"),
    }
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
        let text = message(br#"{"n":"two"}"#);
        assert!(
            text.starts_with("n: ") && text.contains("\"two\""),
            "{text}"
        );
        assert!(message(b"{\"n\":1").contains("not valid JSON"));
        assert!(message(b"{} {}").contains("not valid JSON"));
        assert!(message(b"[1]").contains("not a JSON object"));
        assert!(message(b"").contains("not a JSON object"));
        assert!(message(b"{\"n\":\"\xff\"}").contains("byte 6"));
    }

    #[tokio::test]
    async fn reads_up_to_the_limit() {
        let headers = HeaderMap::new();
        let body = read(&headers, Body::from(vec![1; 8]), 8).await.unwrap();
        assert_eq!(body.len(), 8);
        let error = read(&headers, Body::from(vec![1; 9]), 8).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "The request body has 9 bytes, the limit is 8 bytes."
        );
        let error = read(&headers, Body::from(vec![1; 65]), 8)
            .await
            .unwrap_err();
        assert!(error.to_string().contains("more than 64"));
    }

    #[tokio::test]
    async fn gives_a_stalled_body_up() {
        let begun = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from("{\"n\""))]);
        let body = Body::from_stream(begun.chain(futures::stream::pending()));
        let headers = HeaderMap::new();
        let read = read_within(&headers, body, 8, Duration::from_millis(10));
        let error = timeout(Duration::from_secs(20), read).await.unwrap();
        let text = error.unwrap_err().to_string();
        assert!(text.contains("10ms") && text.contains("4 bytes"), "{text}");
    }
}
