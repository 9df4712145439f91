//! One choice's tokens: each position once, in order, whoever reports it.

use std::collections::BTreeMap;

use tasuki_wire::v1;

use crate::serve::api::{Event, Finish};

/// The output of one choice so far.
#[derive(Debug)]
pub struct Choice {
    pub index: u32,
    pub tokens: Vec<u32>,
    pub end: Option<End>,
    max_tokens: usize,
    /// What arrived ahead of its turn, by position.
    early: BTreeMap<usize, Piece>,
}

/// Why a choice has no more tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Finished(Finish),
    /// The client stopped it.
    Stopped,
}

#[derive(Debug, Clone)]
struct Piece {
    tokens: Vec<u32>,
    logprobs: Vec<v1::TokenLogprob>,
    finish: Option<Finish>,
}

impl Choice {
    pub fn new(index: u32, max_tokens: u32) -> Self {
        Self {
            index,
            tokens: Vec::new(),
            end: None,
            max_tokens: max_tokens as usize,
            early: BTreeMap::new(),
        }
    }

    /// Takes a report; pushes what is new and in turn.
    pub fn accept(&mut self, output: v1::Output, events: &mut Vec<Event>) {
        let finish = match output.finish() {
            v1::FinishReason::FinishNone => None,
            v1::FinishReason::FinishStop => Some(Finish::Stop),
            v1::FinishReason::FinishLength => Some(Finish::Length),
        };
        let piece = Piece {
            tokens: output.tokens,
            logprobs: output.logprobs,
            finish,
        };
        let known = self.early.entry(output.position as usize);
        known
            .and_modify(|known| {
                if known.tokens.len() <= piece.tokens.len() {
                    known.clone_from(&piece);
                }
            })
            .or_insert(piece);
        while let Some(entry) = self.early.first_entry() {
            let position = *entry.key();
            if self.end.is_some() {
                self.early.clear();
            } else if position > self.tokens.len() {
                return;
            } else {
                let piece = entry.remove();
                self.append(position, piece, events);
            }
        }
    }

    /// Drops what came ahead of its turn: another attempt is going to say it.
    pub fn forget_early(&mut self) {
        self.early.clear();
    }

    fn append(&mut self, position: usize, piece: Piece, events: &mut Vec<Event>) {
        let known = self.tokens.len() - position;
        let room = self.max_tokens - self.tokens.len();
        let mut finish = piece.finish.filter(|_| known <= piece.tokens.len());
        let tokens: Vec<u32> = piece.tokens.into_iter().skip(known).take(room).collect();
        let logprobs: Vec<_> = piece.logprobs.into_iter().skip(known).take(room).collect();
        self.tokens.extend_from_slice(&tokens);
        if finish.is_none() && self.tokens.len() == self.max_tokens {
            finish = Some(Finish::Length);
        }
        self.end = finish.map(End::Finished);
        if !tokens.is_empty() || finish.is_some() {
            events.push(Event::Tokens {
                choice: self.index,
                tokens,
                logprobs,
                finish,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(position: u32, tokens: &[u32], finish: v1::FinishReason) -> v1::Output {
        v1::Output {
            position,
            tokens: tokens.to_vec(),
            logprobs: tokens
                .iter()
                .map(|&token| v1::TokenLogprob {
                    token,
                    ..Default::default()
                })
                .collect(),
            finish: finish.into(),
            ..Default::default()
        }
    }

    fn feed(choice: &mut Choice, output: v1::Output) -> Vec<(Vec<u32>, Option<Finish>)> {
        let mut events = Vec::new();
        choice.accept(output, &mut events);
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

    const NONE: v1::FinishReason = v1::FinishReason::FinishNone;
    const STOP: v1::FinishReason = v1::FinishReason::FinishStop;

    #[test]
    fn repeats_are_dropped_and_overlaps_cut() {
        let mut choice = Choice::new(0, 10);
        assert_eq!(feed(&mut choice, output(0, &[5], NONE)), [(vec![5], None)]);
        assert!(feed(&mut choice, output(0, &[5], NONE)).is_empty());
        assert_eq!(
            feed(&mut choice, output(0, &[5, 6, 7], NONE)),
            [(vec![6, 7], None)]
        );
    }

    #[test]
    fn what_comes_early_waits() {
        let mut choice = Choice::new(0, 10);
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
    fn a_finish_counts_once_even_with_a_known_token() {
        let mut choice = Choice::new(0, 10);
        feed(&mut choice, output(0, &[5], NONE));
        assert_eq!(
            feed(&mut choice, output(0, &[5], STOP)),
            [(vec![], Some(Finish::Stop))]
        );
        assert!(feed(&mut choice, output(0, &[5], STOP)).is_empty());
    }

    #[test]
    fn a_finish_at_an_older_position_is_not_believed() {
        let mut choice = Choice::new(0, 10);
        feed(&mut choice, output(0, &[5, 6], NONE));
        assert!(feed(&mut choice, output(0, &[5], STOP)).is_empty());
        assert_eq!(choice.end, None);
    }

    #[test]
    fn the_limit_ends_a_choice_whatever_the_worker_says() {
        let mut choice = Choice::new(0, 2);
        assert_eq!(
            feed(&mut choice, output(0, &[5, 6, 7], NONE)),
            [(vec![5, 6], Some(Finish::Length))]
        );
    }

    #[test]
    fn forgotten_tokens_do_not_come_back() {
        let mut choice = Choice::new(0, 10);
        feed(&mut choice, output(1, &[9], NONE));
        choice.forget_early();
        assert_eq!(feed(&mut choice, output(0, &[5], NONE)), [(vec![5], None)]);
    }
}
