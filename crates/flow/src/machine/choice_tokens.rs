//! One choice's tokens: each position once, in order, whichever worker reports it.

use std::collections::BTreeMap;

use crate::generation::{Event, Finish};
use crate::leg::Output;
use crate::opaque::Opaque;
use crate::sampling::TokenLogprob;

/// The output of one choice so far.
#[derive(Debug)]
pub struct ChoiceTokens {
    pub index: u32,
    pub tokens: Vec<u32>,
    pub end: Option<End>,
    max_tokens: usize,
    /// Runs that arrived before those that precede them, by position.
    early: BTreeMap<usize, Run>,
}

/// Why a choice has no more tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Finished(Finish),
    /// The client stopped it.
    Stopped,
}

#[derive(Debug, Clone)]
struct Run {
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprob>,
    finish: Option<Finish>,
    frame: Option<Opaque>,
}

impl ChoiceTokens {
    pub fn new(index: u32, max_tokens: u32) -> Self {
        Self {
            index,
            tokens: Vec::new(),
            end: None,
            max_tokens: max_tokens as usize,
            early: BTreeMap::new(),
        }
    }

    /// Takes a run; emits what is new and in order.
    pub fn accept(&mut self, output: Output, mut emit: impl FnMut(Event)) {
        if self.end.is_some() {
            return;
        }
        let position = output.position as usize;
        let run = Run {
            tokens: output.tokens,
            logprobs: output.logprobs,
            finish: output.finish,
            frame: output.frame,
        };
        if position > self.tokens.len() {
            self.keep_early(position, run);
            return;
        }
        self.append(position, run, &mut emit);
        while let Some(entry) = self.early.first_entry() {
            let position = *entry.key();
            if self.end.is_some() {
                self.early.clear();
            } else if position > self.tokens.len() {
                return;
            } else {
                let run = entry.remove();
                self.append(position, run, &mut emit);
            }
        }
    }

    /// Drops runs that arrived early: the next attempt reports them again.
    pub fn forget_early(&mut self) {
        self.early.clear();
    }

    /// Of two runs at one position the longer one stays, of equals the later one.
    fn keep_early(&mut self, position: usize, run: Run) {
        match self.early.get_mut(&position) {
            Some(known) if known.tokens.len() > run.tokens.len() => {}
            Some(known) => *known = run,
            None => {
                self.early.insert(position, run);
            }
        }
    }

    /// Appends what is new in a run that begins at `position`, which is not ahead.
    fn append(&mut self, position: usize, run: Run, emit: &mut impl FnMut(Event)) {
        let known = self.tokens.len() - position;
        let room = self.max_tokens - self.tokens.len();
        let mut finish = run.finish.filter(|_| known <= run.tokens.len());
        let mut tokens = cut(run.tokens, known, room);
        let logprobs = cut(run.logprobs, known, room);
        self.tokens.extend_from_slice(&tokens);
        if finish.is_none() && self.tokens.len() == self.max_tokens {
            finish = Some(Finish::Length);
        }
        self.end = finish.map(End::Finished);
        // Frames are counted, so none comes twice; the last ones may have no token.
        if let Some(frame) = run.frame {
            let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            tokens.clear();
            emit(Event::Frame {
                frame,
                tokens: count,
            });
        }
        if !tokens.is_empty() || finish.is_some() {
            emit(Event::Tokens {
                choice: self.index,
                tokens,
                logprobs,
                finish,
            });
        }
    }
}

/// `items` without the first `skip`, and at most `most` of the rest; in place.
fn cut<T>(mut items: Vec<T>, skip: usize, most: usize) -> Vec<T> {
    items.drain(..skip.min(items.len()));
    items.truncate(most);
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(position: u32, tokens: &[u32], finish: Option<Finish>) -> Output {
        Output {
            position,
            tokens: tokens.to_vec(),
            logprobs: tokens
                .iter()
                .map(|&token| TokenLogprob {
                    token,
                    ..Default::default()
                })
                .collect(),
            finish,
            ..Default::default()
        }
    }

    fn feed(choice: &mut ChoiceTokens, output: Output) -> Vec<(Vec<u32>, Option<Finish>)> {
        let mut events = Vec::new();
        choice.accept(output, |event| events.push(event));
        events
            .into_iter()
            .map(|event| match event {
                Event::Tokens {
                    tokens,
                    logprobs,
                    finish,
                    ..
                } => {
                    assert!(logprobs.iter().map(|l| l.token).eq(tokens.iter().copied()));
                    (tokens, finish)
                }
                other => panic!("unexpected {other:?}"),
            })
            .collect()
    }

    const NONE: Option<Finish> = None;
    const STOP: Option<Finish> = Some(Finish::Stop);

    #[test]
    fn repeats_are_dropped_and_overlaps_cut() {
        let mut choice = ChoiceTokens::new(0, 10);
        assert_eq!(feed(&mut choice, output(0, &[5], NONE)), [(vec![5], None)]);
        assert!(feed(&mut choice, output(0, &[5], NONE)).is_empty());
        assert_eq!(
            feed(&mut choice, output(0, &[5, 6, 7], NONE)),
            [(vec![6, 7], None)]
        );
    }

    #[test]
    fn runs_that_overtake_others_wait() {
        let mut choice = ChoiceTokens::new(0, 10);
        assert!(feed(&mut choice, output(2, &[7], STOP)).is_empty());
        assert!(feed(&mut choice, output(1, &[6], NONE)).is_empty());
        assert_eq!(
            feed(&mut choice, output(0, &[5], NONE)),
            [
                (vec![5], None),
                (vec![6], None),
                (vec![7], Some(Finish::Stop))
            ]
        );
        assert!(feed(&mut choice, output(3, &[8], NONE)).is_empty());
    }

    #[test]
    fn of_runs_that_wait_at_one_position_the_longest_stays() {
        for runs in [[&[6, 7][..], &[6]], [&[6], &[6, 7]]] {
            let mut choice = ChoiceTokens::new(0, 10);
            for run in runs {
                assert!(feed(&mut choice, output(1, run, NONE)).is_empty());
            }
            let all = feed(&mut choice, output(0, &[5], NONE));
            assert_eq!(all, [(vec![5], None), (vec![6, 7], None)]);
        }
    }

    #[test]
    fn a_finish_counts_once_even_with_a_known_token() {
        let mut choice = ChoiceTokens::new(0, 10);
        feed(&mut choice, output(0, &[5], NONE));
        assert_eq!(
            feed(&mut choice, output(0, &[5], STOP)),
            [(vec![], Some(Finish::Stop))]
        );
        assert!(feed(&mut choice, output(0, &[5], STOP)).is_empty());
    }

    #[test]
    fn a_finish_at_an_older_position_is_ignored() {
        let mut choice = ChoiceTokens::new(0, 10);
        feed(&mut choice, output(0, &[5, 6], NONE));
        assert!(feed(&mut choice, output(0, &[5], STOP)).is_empty());
        assert_eq!(choice.end, None);
    }

    #[test]
    fn the_limit_ends_a_choice_whatever_the_worker_says() {
        let mut choice = ChoiceTokens::new(0, 2);
        assert_eq!(
            feed(&mut choice, output(0, &[5, 6, 7], NONE)),
            [(vec![5, 6], Some(Finish::Length))]
        );
    }

    #[test]
    fn forgotten_tokens_do_not_come_back() {
        let mut choice = ChoiceTokens::new(0, 10);
        feed(&mut choice, output(1, &[9], NONE));
        choice.forget_early();
        assert_eq!(feed(&mut choice, output(0, &[5], NONE)), [(vec![5], None)]);
    }
}
