//! Data-parallel ranks of one SGLang worker. Where the client names none the engines choose: a
//! room's number gives prefill's rank, which decode computes too. A rank that the client names
//! holds for each worker of its request, and decode is told that prefill ran there.

use super::leg::Failure;
use crate::app::MAX_QUOTED_CHARS;
use crate::error::ApiError;
use crate::foreign::object::Object;
use crate::foreign::request::ForeignRequest;

/// The first that is there counts, as in SGLang.
const HEADER: &str = "x-data-parallel-rank";
const FIELDS: [&str; 2] = ["routed_dp_rank", "data_parallel_rank"];

/// Where prefill ran, for decode.
const OF_PREFILL: &str = "disagg_prefill_dp_rank";

/// The rank that a client names. It is checked here: a rank that is not there ends some versions
/// of SGLang.
///
/// # Errors
///
/// The client's 400.
pub fn named(request: &ForeignRequest, ranks: Option<u32>) -> Result<Option<u32>, Failure> {
    let Some((name, given)) = given(request) else {
        return Ok(None);
    };
    let rank = given.trim().parse().ok();
    let rank = rank.filter(|rank| ranks.is_none_or(|ranks| *rank < ranks));
    rank.map(Some).ok_or_else(|| {
        let has = match ranks {
            None | Some(0) => String::new(),
            Some(1) => ", which has one: 0".to_owned(),
            Some(ranks) => format!(", which has {ranks}: 0 to {}", ranks - 1),
        };
        let shown: String = given.chars().take(MAX_QUOTED_CHARS).collect();
        let message = format!(
            "{name} is {shown}, and it must be a data-parallel rank of the worker{has}. Leave it \
             out, and the worker chooses."
        );
        Failure::rejected(&ApiError::invalid(name, message))
    })
}

fn given(request: &ForeignRequest) -> Option<(&'static str, String)> {
    if let Some(value) = request.headers.get(HEADER) {
        let value = String::from_utf8_lossy(value.as_bytes());
        return Some((HEADER, value.into_owned()));
    }
    let name = FIELDS.into_iter().find(|name| request.body.has(name))?;
    Some((name, request.body.get(name)?.get().to_owned()))
}

/// Has both legs of a handoff run on a rank. SGLang reads the header on some of its paths only.
pub fn set(body: &mut Object, rank: u32, is_decode: bool) {
    body.set(FIELDS[0], &rank);
    if is_decode {
        body.set(OF_PREFILL, &rank);
    }
}
