//! How large an answer can become, as far as the request tells: a body of some kilobytes
//! must not ask for gigabytes.
//!
//! An answer that is not streamed is in memory as a whole. So is one of whose stream each event has
//! all so far. Of other streams only what a choice begins with counts, the echoed prompt.

use super::outputs::Job;
use super::wording::Wording;
use crate::error::ApiError;
use crate::openai::request::delivery::Delivery;
use crate::openai::request::intake::Prepared;

/// JSON of a token's text, about; special characters are escaped.
const TEXT_BYTES: usize = 8;
/// JSON of a token id.
const ID_BYTES: usize = 7;

/// # Errors
/// `Invalid` when the answer may have more than `limit` bytes.
pub fn check<W: Wording>(prepared: &Prepared<W>, limit: usize) -> Result<(), ApiError> {
    let delivery = &prepared.delivery;
    let in_parts = comes_in_parts::<W>(delivery);
    let jobs = prepared.jobs.iter();
    let bytes: usize = jobs
        .map(|job| {
            let copies = if in_parts { 1 } else { delivery.n as usize };
            let output = if in_parts || job.muted {
                0
            } else {
                let tokens = job.generation.sampling.max_tokens as usize;
                tokens.saturating_mul(output_token_bytes::<W>(
                    delivery,
                    job.generation.sampling.logprobs,
                ))
            };
            copies.saturating_mul(output.saturating_add(prompt_bytes::<W>(delivery, job)))
        })
        .fold(0, usize::saturating_add);
    if bytes <= limit {
        return Ok(());
    }
    let sampling = &prepared.jobs[0].generation.sampling;
    let echoed = if prepared.jobs[0].echo.is_some() {
        ", each with its prompt echoed"
    } else {
        ""
    };
    let remedy = if delivery.stream || W::CUMULATIVE {
        ""
    } else {
        ", or for a stream"
    };
    let field = match delivery.n {
        1 => prepared.max_tokens_field,
        _ => "n",
    };
    Err(ApiError::invalid(
        field,
        format!(
            "The answer may have about {bytes} bytes ({} choices of up to {} tokens with {} \
             logprobs each{echoed}); the limit is {limit} (--max-answer-bytes). Ask for fewer \
             choices, tokens or logprobs{remedy}.",
            prepared.jobs.len() * delivery.n as usize,
            sampling.max_tokens,
            sampling.logprobs.map_or(0, |top| top + 1),
        ),
    ))
}

/// How many output tokens each choice may have so that the answer stays below `limit`:
/// for requests that do not say how many they want.
pub fn tokens_that_fit<W: Wording>(
    delivery: &Delivery,
    logprobs: Option<u32>,
    limit: usize,
) -> u32 {
    if comes_in_parts::<W>(delivery) {
        return u32::MAX;
    }
    let token = output_token_bytes::<W>(delivery, logprobs) * delivery.n as usize;
    u32::try_from(limit / token).unwrap_or(u32::MAX).max(1)
}

/// Whether no more of an answer is in memory than what is new.
fn comes_in_parts<W: Wording>(delivery: &Delivery) -> bool {
    delivery.stream && !W::CUMULATIVE
}

fn output_token_bytes<W: Wording>(delivery: &Delivery, logprobs: Option<u32>) -> usize {
    TEXT_BYTES + id_bytes(delivery) + logprob_bytes::<W>(logprobs)
}

fn prompt_bytes<W: Wording>(delivery: &Delivery, job: &Job) -> usize {
    let tokens = job.generation.prompt.len();
    let ids = tokens * id_bytes(delivery);
    let Some(echo) = &job.echo else {
        return ids;
    };
    let logprobs = logprob_bytes::<W>(job.generation.sampling.prompt_logprobs);
    ids + echo.bytes() + tokens.saturating_mul(logprobs)
}

fn id_bytes(delivery: &Delivery) -> usize {
    if delivery.return_token_ids {
        ID_BYTES
    } else {
        0
    }
}

fn logprob_bytes<W: Wording>(logprobs: Option<u32>) -> usize {
    logprobs.map_or(0, |top| (top as usize + 1) * W::LOGPROB_BYTES)
}
