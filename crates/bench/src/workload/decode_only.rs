//! Decode at a real context length, with as little prefill as can be.
//!
//! A prompt of one token would measure decode at a context that hardly exists:
//! attention reads next to nothing. So prompts have their real length, and each
//! is sent once before the run, unmeasured. The measured request finds it in
//! the server's prefix cache; what is left of its prefill is the last block.
//! The warm-up asks for two tokens, because an answer of one never leaves the
//! prefill worker of a split server, and its decode worker is to hold the
//! prompt as well.
//!
//! TPOT and ITL of such a run are those of decode, if every prompt stayed in
//! the cache: where TTFT is that of the workload prefill-only, it did not, and
//! `distinct_prompts` has to be less, but not less than run at once, since
//! requests that share blocks also share the memory reads of them in part. A
//! server with several workers caches a prompt where it was warmed; its router
//! has to send it there again.

use std::ops::Range;

use super::Making;
use super::lengths::Lengths;
use crate::error::PlanError;
use crate::plan::{Planned, Workload};
use crate::seeds::{Purpose, stream};
use crate::tokens::Segment;

/// Makes a split server hand the prompt's KV to the decode worker.
const WARM_UP_TOKENS: u32 = 2;

/// See the module.
#[derive(Debug)]
pub struct DecodeOnly {
    making: Making,
    lengths: Lengths,
    prompts: usize,
    cold: Range<usize>,
    left: Range<usize>,
}

impl DecodeOnly {
    /// `distinct_prompts` are used in turn; None: every request has its own.
    ///
    /// # Errors
    /// [`PlanError::TooShort`].
    pub fn new(
        making: Making,
        lengths: Lengths,
        distinct_prompts: Option<usize>,
    ) -> Result<Self, PlanError> {
        making.maker.check_length(lengths.input().least())?;
        let prompts = distinct_prompts
            .unwrap_or(making.requests)
            .min(making.requests);
        Ok(Self {
            cold: 0..prompts,
            left: 0..making.requests,
            making,
            lengths,
            prompts,
        })
    }

    fn planned(&self, index: usize, prompt: usize, output_tokens: u32) -> Planned {
        let (tokens, _) = self.lengths.of(self.making.seed, prompt);
        let stream = stream(Purpose::OwnTokens, prompt as u64);
        let (prompt, input_tokens) = self.making.maker.prompt(&[Segment { stream, tokens }]);
        Planned {
            index,
            prompt,
            input_tokens,
            output_tokens,
            exact_output: self.making.exact_output,
            at: None,
        }
    }
}

impl Workload for DecodeOnly {
    fn warm_up(&mut self) -> Option<Planned> {
        let prompt = self.cold.next()?;
        Some(self.planned(prompt, prompt, WARM_UP_TOKENS))
    }

    fn next(&mut self) -> Option<Planned> {
        let index = self.left.next()?;
        let (_, output_tokens) = self.lengths.of(self.making.seed, index);
        Some(self.planned(index, index % self.prompts, output_tokens))
    }

    fn total(&self) -> Option<usize> {
        Some(self.making.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::DecodeOnly;
    use crate::plan::Workload;
    use crate::workload::lengths::{Lengths, RangeConvention};
    use crate::workload::testing::{all, making};

    fn lengths() -> Lengths {
        Lengths {
            range_ratio: Some(0.3),
            range_convention: Some(RangeConvention::Vllm),
            ..Lengths::fixed(50, 20)
        }
    }

    #[test]
    fn every_measured_prompt_was_sent_before() {
        let mut workload = DecodeOnly::new(making(10, 3), lengths(), Some(4)).unwrap();
        let warm: Vec<_> = std::iter::from_fn(|| workload.warm_up()).collect();
        assert_eq!(warm.len(), 4);
        // Two tokens: the KV of an answer of one would never reach a decode worker.
        assert!(warm.iter().all(|p| p.output_tokens == 2));
        let measured = all(&mut workload);
        assert_eq!((measured.len(), workload.total()), (10, Some(10)));
        for request in &measured {
            assert_eq!(request.prompt, warm[request.index % 4].prompt);
            assert!((14..=26).contains(&request.output_tokens));
        }
    }

    #[test]
    fn by_default_no_prompt_is_measured_twice() {
        for wanted in [None, Some(50)] {
            let mut workload = DecodeOnly::new(making(6, 3), lengths(), wanted).unwrap();
            let warm: Vec<_> = std::iter::from_fn(|| workload.warm_up()).collect();
            assert_eq!(warm.len(), 6);
            let measured = all(&mut workload);
            for (i, a) in measured.iter().enumerate() {
                assert!(measured[i + 1..].iter().all(|b| a.prompt != b.prompt));
            }
        }
    }
}
