//! What must hold of dispatches, of what the client sees, and at the end.

use std::collections::{BTreeMap, BTreeSet};

use tasuki_core::HandoffKind;

use super::super::sim_worker::truth;
use super::{World, pop};
use crate::generation::{Event, Finish, ServeError, Timings};
use crate::leg::{Handoff, LegKind, LegSpec};
use crate::worker_ref::LegId;

/// What the client has seen.
#[derive(Default)]
pub struct Client {
    pub scored: bool,
    pub tokens: BTreeMap<u32, Vec<u32>>,
    pub finished: BTreeMap<u32, Finish>,
    pub stopped: BTreeSet<u32>,
    pub gone: bool,
    pub done: Option<Timings>,
    pub failed: Option<ServeError>,
}

impl World {
    pub(super) fn check_dispatch(&mut self, leg: LegId, spec: &LegSpec) {
        assert!(
            self.legs_dispatched.insert(leg),
            "an attempt has two legs on a worker"
        );
        assert!(!spec.choices.is_empty());
        assert_eq!(
            spec.opaque.as_deref(),
            self.opaque.as_ref(),
            "the content as it was"
        );
        let resumed = spec.resumed.len();
        assert!(resumed == 0 || spec.choices.len() == 1);
        assert!(resumed < self.setup.lengths.max_tokens);
        for (position, &token) in spec.resumed.iter().enumerate() {
            assert_eq!(token, truth(spec.choices[0], position));
        }
        if spec.kind != LegKind::Decode {
            for choice in &spec.choices {
                let seen = self.client.tokens.get(choice).map_or(0, Vec::len);
                assert_eq!(resumed, seen, "what was streamed is resumed");
            }
        }
        let split = spec.kind != LegKind::Colocated;
        assert_eq!(split, spec.handoff.is_some());
        let capabilities = self.setup.capabilities;
        assert!(capabilities.resumes || resumed == 0);
        assert!(capabilities.splits_choices || !split || spec.choices.len() == 1);
        match &spec.handoff {
            Some(Handoff::Redeem { ticket, .. }) => {
                let at = self.tickets.iter().position(|issued| issued == ticket);
                self.tickets
                    .remove(at.expect("a ticket that was issued, once"));
                assert_eq!(spec.kind, LegKind::Decode);
            }
            Some(Handoff::IssueTicket) => assert_eq!(spec.kind, LegKind::Prefill),
            Some(Handoff::With(_)) => {
                assert_eq!(capabilities.handoff, HandoffKind::Concurrent);
            }
            None => {}
        }
        let long = resumed + 1 < self.setup.lengths.max_tokens;
        assert!(!split || long || self.setup.frames);
    }

    pub(super) fn show_client(&mut self, event: Event) {
        assert!(!self.is_over(), "something follows the end");
        match event {
            Event::Tokens {
                choice,
                tokens,
                finish,
                ..
            } => {
                assert!(!self.client.finished.contains_key(&choice));
                assert_eq!(self.client.scored, self.setup.scored);
                let seen = self.client.tokens.entry(choice).or_default();
                for token in tokens {
                    assert_eq!(token, truth(choice, seen.len()), "the tokens' order");
                    seen.push(token);
                }
                if let Some(finish) = finish {
                    self.client.finished.insert(choice, finish);
                }
            }
            Event::Frame { frame, tokens } => {
                assert!(self.setup.frames);
                let content = frame.get::<Vec<u32>>().expect("a frame of the worker");
                assert_eq!(content.len(), tokens as usize);
                let seen = self.client.tokens.entry(0).or_default();
                for &token in content {
                    assert_eq!(token, truth(0, seen.len()), "the frames' order");
                    seen.push(token);
                }
            }
            Event::Done(timings) => self.client.done = Some(*timings),
            Event::Failed(error) => self.client.failed = Some(error),
            Event::PromptLogprobs(_) => {
                assert!(self.setup.scored && !self.client.scored);
                self.client.scored = true;
            }
        }
    }

    /// Whether nothing went wrong, in whatever order it went.
    pub fn is_faultless(&self) -> bool {
        self.faults_left == self.setup.faults
    }

    pub fn is_over(&self) -> bool {
        self.client.done.is_some() || self.client.failed.is_some()
    }

    /// What must hold when the request ended, however it went.
    pub fn check_end(&mut self) {
        assert!(self.machine.is_over());
        if self.client.done.is_some() {
            for choice in 0..self.setup.n {
                let length = self.client.tokens.get(&choice).map_or(0, Vec::len);
                if !self.client.stopped.contains(&choice) {
                    assert_eq!(length, self.setup.lengths.of(choice), "choice {choice}");
                    let expected = self.setup.lengths.finish(choice);
                    assert_eq!(self.client.finished.get(&choice), Some(&expected));
                }
            }
        }
        self.check_nothing_stranded();
    }

    /// Every leg ended, or its worker gets an abort.
    fn check_nothing_stranded(&mut self) {
        while let Some(key) = self
            .to_worker
            .values()
            .find_map(|(key, queue)| (!queue.is_empty()).then_some(*key))
        {
            let effect = pop(&mut self.to_worker, key);
            self.deliver(key, effect);
        }
        let left: Vec<_> = self.legs().map(|(_, leg)| leg.clone()).collect();
        assert!(left.is_empty(), "stranded: {left:?}");
    }
}
