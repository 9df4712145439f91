//! What was seen of every request, in seconds of the run, and how many tokens
//! each chunk was.
//!
//! Tokens of chunks are counted by the server, chunk by chunk; else the
//! server's total (else our own tokenizer's) is shared among the chunks: one
//! for each as far as they go, the rest by length of text.

use serde::Serialize;
use tasuki_text::ModelText;
use tokio::time::Instant;

use crate::client::{Answer, Chunk, Failure};
use crate::phases::Phases;
use crate::plan::Planned;

/// Who counted the tokens of an answer; the later, the less exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenCountSource {
    /// The server, with every chunk.
    Chunks,
    /// The server, at the end.
    Usage,
    /// We, with the model's tokenizer.
    Tokenizer,
    /// Nobody.
    Unknown,
}

/// Tokens that came at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrived {
    pub at_s: f64,
    pub tokens: u32,
}

/// One request, over. Times are seconds since the run's start.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub index: usize,
    pub due_s: f64,
    pub sent_s: f64,
    /// The last token; of a failed request, its end.
    pub end_s: f64,
    pub input_tokens: Option<u32>,
    pub output_tokens: Option<u32>,
    pub source: TokenCountSource,
    pub arrived: Vec<Arrived>,
    pub failure: Option<Failure>,
    pub phases: Option<Phases>,
}

impl Record {
    /// When token `number` (from 1) came.
    pub fn token_s(&self, number: u32) -> Option<f64> {
        let mut count = 0;
        self.arrived.iter().find_map(|arrived| {
            count += arrived.tokens;
            (count >= number).then_some(arrived.at_s)
        })
    }

    /// When the first token came: the first chunk, if nobody counts tokens.
    pub fn first_s(&self) -> Option<f64> {
        match self.source {
            TokenCountSource::Unknown => self.arrived.first().map(|arrived| arrived.at_s),
            _ => self.token_s(1),
        }
    }
}

/// Turns answers into records.
pub struct Recorder {
    start: Instant,
    tokenizer: Option<ModelText>,
}

impl Recorder {
    /// Times count from `start`; `tokenizer` is for servers that do not count.
    pub fn new(start: Instant, tokenizer: Option<ModelText>) -> Self {
        Self { start, tokenizer }
    }

    /// The record of an answer. Tokenizes if the server has not counted, so it
    /// is for after the run.
    pub fn record(&self, planned: &Sent, answer: Answer) -> Record {
        let seconds = |at: Instant| (at - self.start).as_secs_f64();
        let (source, output_tokens, tokens) = self.count(&answer);
        let arrived: Vec<Arrived> = std::iter::zip(&answer.chunks, tokens)
            .map(|(chunk, tokens)| Arrived {
                at_s: seconds(chunk.at),
                tokens,
            })
            .collect();
        let last = answer.chunks.last().filter(|_| answer.failure.is_none());
        Record {
            index: planned.index,
            due_s: seconds(planned.due),
            sent_s: seconds(answer.sent),
            end_s: seconds(last.map_or(answer.end, |chunk| chunk.at)),
            input_tokens: answer
                .usage
                .map(|usage| usage.prompt_tokens)
                .filter(|tokens| *tokens > 0)
                .or(planned.input_tokens),
            output_tokens,
            source,
            arrived,
            failure: answer.failure,
            phases: answer.phases,
        }
    }

    fn count(&self, answer: &Answer) -> (TokenCountSource, Option<u32>, Vec<u32>) {
        let chunks = &answer.chunks;
        match (answer.usage, &self.tokenizer) {
            (Some(usage), _) if answer.counted => {
                let mut tokens: Vec<u32> = chunks.iter().map(|chunk| chunk.tokens).collect();
                // Tokens without text of their own, told of at the end: an end of sequence.
                let untold = usage.completion_tokens.saturating_sub(tokens.iter().sum());
                if let Some(last) = tokens.last_mut() {
                    *last += untold;
                }
                (
                    TokenCountSource::Chunks,
                    Some(usage.completion_tokens),
                    tokens,
                )
            }
            (Some(usage), _) => {
                let total = usage.completion_tokens;
                (TokenCountSource::Usage, Some(total), share(total, chunks))
            }
            (None, Some(tokenizer)) => {
                let count = |text: &str| tokenizer.encode(text, false).map_or(0, |ids| ids.len());
                let total = (count(&answer.reasoning) + count(&answer.text)) as u32;
                let source = TokenCountSource::Tokenizer;
                (source, Some(total), share(total, chunks))
            }
            (None, None) => (TokenCountSource::Unknown, None, vec![0; chunks.len()]),
        }
    }
}

/// What a record needs to know of the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sent {
    pub index: usize,
    pub input_tokens: Option<u32>,
    pub due: Instant,
}

impl Sent {
    pub fn new(planned: &Planned, due: Instant) -> Self {
        Self {
            index: planned.index,
            input_tokens: planned.input_tokens,
            due,
        }
    }
}

/// `total` tokens among `chunks`: one for each in order as far as they go, the
/// rest in proportion to the text, rounded so that sums up to any chunk are
/// within one of their share.
fn share(total: u32, chunks: &[Chunk]) -> Vec<u32> {
    let each_one = total.min(chunks.len() as u32);
    let rest = u64::from(total - each_one);
    let bytes: u64 = chunks.iter().map(|c| u64::from(c.text_bytes)).sum();
    let (mut seen, mut given) = (0, 0);
    let mut tokens = Vec::with_capacity(chunks.len());
    for (index, chunk) in chunks.iter().enumerate() {
        seen += u64::from(chunk.text_bytes);
        let due = rest * seen / bytes.max(1);
        tokens.push(u32::from(index < each_one as usize) + (due - given) as u32);
        given = due;
    }
    tokens
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::client::Usage;

    fn answer(start: Instant, chunks: &[(u64, u32, u32)]) -> Answer {
        let mut answer = Answer::sent(start + Duration::from_millis(5));
        answer.chunks = chunks
            .iter()
            .map(|&(at_ms, tokens, text_bytes)| Chunk {
                at: start + Duration::from_millis(at_ms),
                tokens,
                text_bytes,
            })
            .collect();
        answer
    }

    fn usage(completion_tokens: u32) -> Option<Usage> {
        Some(Usage {
            prompt_tokens: 9,
            completion_tokens,
        })
    }

    fn record(start: Instant, answer: Answer) -> Record {
        let sent = Sent {
            index: 3,
            input_tokens: Some(8),
            due: start,
        };
        let end = start + Duration::from_millis(99);
        Recorder::new(start, None).record(&sent, answer.ended(None, end))
    }

    fn tokens(record: &Record) -> Vec<u32> {
        record.arrived.iter().map(|a| a.tokens).collect()
    }

    #[test]
    fn counted_chunks_keep_their_counts_and_the_last_gets_what_was_told_late() {
        let start = Instant::now();
        let mut counted = answer(start, &[(10, 1, 4), (20, 3, 9), (30, 0, 2)]);
        counted.usage = usage(5);
        let record = record(start, counted);
        assert_eq!(record.source, TokenCountSource::Chunks);
        assert_eq!(tokens(&record), [1, 3, 1]);
        assert_eq!(
            (record.input_tokens, record.output_tokens),
            (Some(9), Some(5))
        );
        assert_eq!(
            (record.due_s, record.sent_s, record.end_s),
            (0.0, 0.005, 0.03)
        );
        assert_eq!(
            (record.token_s(1), record.token_s(2)),
            (Some(0.01), Some(0.02))
        );
        assert_eq!((record.token_s(5), record.token_s(6)), (Some(0.03), None));
    }

    #[test]
    fn a_total_is_shared_by_text() {
        let start = Instant::now();
        for (total, shares) in [
            (3, vec![1, 1, 1]),
            (2, vec![1, 1, 0]),
            (13, vec![2, 8, 3]),
            (0, vec![0, 0, 0]),
        ] {
            let mut answer = answer(start, &[(10, 0, 10), (20, 0, 70), (30, 0, 20)]);
            answer.usage = usage(total);
            answer.counted = false;
            let record = record(start, answer);
            assert_eq!(record.source, TokenCountSource::Usage);
            assert_eq!(tokens(&record), shares, "{total}");
        }
    }

    #[test]
    fn a_prompt_of_no_tokens_is_one_that_the_server_does_not_count() {
        let start = Instant::now();
        let mut counted = answer(start, &[(10, 1, 4)]);
        counted.usage = Some(Usage {
            prompt_tokens: 0,
            completion_tokens: 1,
        });
        assert_eq!(record(start, counted).input_tokens, Some(8));
    }

    #[test]
    fn nobody_counting_leaves_only_the_first_chunks_time() {
        let start = Instant::now();
        let mut answer = answer(start, &[(10, 0, 10), (20, 0, 70)]);
        answer.counted = false;
        let record = record(start, answer);
        assert_eq!(record.source, TokenCountSource::Unknown);
        assert_eq!((record.output_tokens, record.input_tokens), (None, Some(8)));
        assert_eq!((record.first_s(), record.token_s(1)), (Some(0.01), None));
    }
}
