//! Reads answers of which all bytes are there: what the client must make of them.

use super::{Answer, End};
use crate::MAX_HEADERS;

const MAX_LINE_BYTES: usize = 16 << 10;

/// What a client must make of these bytes, all of which are there.
pub fn expected(mut bytes: &[u8]) -> (Vec<Answer>, End) {
    let mut answers = Vec::new();
    while !bytes.is_empty() {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let Ok(httparse::Status::Complete(length)) = head.parse(bytes) else {
            return (answers, End::Broken);
        };
        bytes = &bytes[length..];
        let Some((body, rest)) = expected_body(&head, bytes) else {
            return (answers, End::Broken);
        };
        let status = head.code.expect("parsed");
        let until_closed = rest.is_none();
        if status >= 200 {
            let close = header(&head, "connection").join(",");
            let keeps_alive = match head.version {
                Some(1) => !close.contains("close"),
                _ => close.contains("keep-alive"),
            };
            let content_type = values(&head, "content-type").next().unwrap_or_default();
            answers.push(Answer {
                status,
                content_type,
                keeps_alive: keeps_alive && !until_closed,
                is_whole: body.is_ok(),
                body: body.clone().unwrap_or_else(|part| part),
            });
            if body.is_err() {
                return (answers, End::Broken);
            }
            if until_closed || !keeps_alive {
                return (answers, End::Last);
            }
            bytes = rest.unwrap_or_default();
        }
    }
    (answers, End::Closed)
}

fn values<'a>(
    head: &'a httparse::Response<'_, '_>,
    name: &'a str,
) -> impl Iterator<Item = String> + 'a {
    let named = head.headers.iter();
    let named = named.filter(move |header| header.name.eq_ignore_ascii_case(name));
    named.map(|header| String::from_utf8_lossy(header.value).into_owned())
}

/// Its values in lower case, without the spaces around them.
fn header(head: &httparse::Response<'_, '_>, name: &str) -> Vec<String> {
    let values = values(head, name).map(|value| value.to_lowercase());
    values.map(|value| value.trim().to_owned()).collect()
}

/// A body, or its part before an error.
type Body = Result<Vec<u8>, Vec<u8>>;

/// The body of an answer and what follows it; no rest: it ends with the connection. `None`: the
/// head does not say where the body ends.
fn expected_body<'a>(
    head: &httparse::Response<'_, '_>,
    bytes: &'a [u8],
) -> Option<(Body, Option<&'a [u8]>)> {
    if matches!(head.code, Some(204 | 304 | 0..200)) {
        return Some((Ok(Vec::new()), Some(bytes)));
    }
    let encoding = header(head, "transfer-encoding").join(",");
    if encoding == "chunked" {
        let (body, rest) = expected_chunks(bytes);
        return Some((body, Some(rest)));
    }
    if !encoding.is_empty() && encoding != "identity" {
        return None;
    }
    let lengths = header(head, "content-length");
    let Some(length) = lengths.first() else {
        return Some((Ok(bytes.to_vec()), None));
    };
    let number = |text: &String| -> Option<u64> {
        let digits = text.chars().all(|letter| letter.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten()
    };
    if lengths.iter().any(|other| number(other) != number(length)) {
        return None;
    }
    let length = usize::try_from(number(length)?).ok()?;
    Some(match bytes.split_at_checked(length) {
        Some((body, rest)) => (Ok(body.to_vec()), Some(rest)),
        None => (Err(bytes.to_vec()), Some(&[])),
    })
}

/// A chunked body and what follows it.
fn expected_chunks(mut bytes: &[u8]) -> (Body, &[u8]) {
    let mut body = Vec::new();
    loop {
        let Some((size, rest)) = expected_size(bytes) else {
            return (Err(body), &[]);
        };
        if size == 0 {
            bytes = rest;
            break;
        }
        let Some((chunk, rest)) = usize::try_from(size)
            .ok()
            .and_then(|size| rest.split_at_checked(size))
        else {
            body.extend_from_slice(rest);
            return (Err(body), &[]);
        };
        body.extend_from_slice(chunk);
        let Some(rest) = rest.strip_prefix(b"\r\n") else {
            return (Err(body), &[]);
        };
        bytes = rest;
    }
    loop {
        let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
            return (Err(body), &[]);
        };
        let (line, rest) = bytes.split_at(end + 1);
        if line.len() > MAX_LINE_BYTES {
            return (Err(body), &[]);
        }
        bytes = rest;
        if line.trim_ascii().is_empty() {
            return (Ok(body), bytes);
        }
    }
}

/// A chunk's size and what follows its line: digits, spaces, an extension after a semicolon.
fn expected_size(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let end = bytes.iter().position(|&byte| byte == b'\r')?;
    let rest = bytes[end..].strip_prefix(b"\r\n")?;
    if end + 2 > MAX_LINE_BYTES {
        return None;
    }
    let line = &bytes[..end];
    let semicolon = line.iter().position(|&byte| byte == b';');
    let size = str::from_utf8(&line[..semicolon.unwrap_or(end)]).ok()?;
    let digits = size.trim_end_matches([' ', '\t']);
    let is_number =
        (1..=16).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = is_number.then(|| u64::from_str_radix(digits, 16).ok());
    Some((number.flatten()?, rest))
}
