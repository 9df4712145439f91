//! Data-parallel ranks of one SGLang worker. Where the client names none the engines choose: a
//! room's number gives prefill's rank, which decode computes too. A rank that the client names
//! holds for each worker of its request, and both are told that prefill runs there: else SGLang fails
//! requests whose room gives another rank. Of a prefill worker whose ranks are whole replicas
//! SGLang 0.5.23 takes each for rank 0 when it compares, so there the router names one itself.

use super::leg::Failure;
use crate::app::MAX_QUOTED_CHARS;
use crate::error::ApiError;
use crate::foreign::object::Object;
use crate::foreign::request::ForeignRequest;

/// The first that is there counts, as in SGLang.
const HEADER: &str = "x-data-parallel-rank";
const FIELDS: [&str; 2] = ["routed_dp_rank", "data_parallel_rank"];

/// Where prefill runs.
const OF_PREFILL: &str = "disagg_prefill_dp_rank";

/// Of one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    pub count: u32,
    /// Each has all of the model, where else they divide its attention alone.
    pub are_replicas: bool,
}

impl Ranks {
    /// How many to choose from, where rooms do not do it.
    pub fn to_name(self) -> Option<u32> {
        (self.are_replicas && self.count > 1).then_some(self.count)
    }
}

/// Where decode meets a prefill worker: host:port, and `#` and how many ranks to choose from.
pub fn endpoint(host: &str, port: u16, to_name: Option<u32>) -> String {
    let ranks = to_name.map(|count| format!("#{count}"));
    format!("{host}:{port}{}", ranks.unwrap_or_default())
}

/// What `endpoint` was made of.
pub fn read_endpoint(endpoint: &str) -> Option<(&str, u16, Option<u32>)> {
    let (host, port) = endpoint.rsplit_once(':')?;
    let (port, ranks) = match port.split_once('#') {
        None => (port, None),
        Some((port, ranks)) => (port, Some(ranks.parse().ok()?)),
    };
    Some((host, port.parse().ok()?, ranks))
}

/// The rank that a client names. It is checked here: a rank that is not there ends some versions
/// of SGLang.
///
/// # Errors
///
/// The client's 400.
pub fn named(request: &ForeignRequest, ranks: Option<Ranks>) -> Result<Option<u32>, Failure> {
    let Some((name, given)) = given(request) else {
        return Ok(None);
    };
    let rank = given.trim().parse().ok();
    let ranks = ranks.map(|ranks| ranks.count);
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

/// Has a leg of a handoff run on a rank. SGLang reads the header on some of its paths only.
pub fn set(body: &mut Object, rank: u32) {
    body.set(FIELDS[0], &rank);
}

/// Tells a leg on which rank prefill runs.
pub fn set_of_prefill(body: &mut Object, rank: u32) {
    body.set(OF_PREFILL, &rank);
}
