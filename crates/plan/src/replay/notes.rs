//! What a replay of a log cannot be, for the reader.

use std::collections::BTreeMap;

use clap::ValueEnum;
use tasuki_reqlog::{Fleet, Log, Outcome as Ended, Request};

use crate::args::PolicyName;

/// `requests` are replayed, `others` are left out; `fleet`: the workers of the replay.
pub fn notes(log: &Log, requests: &[Request], others: &[Request], fleet: &Fleet) -> Vec<String> {
    let mut notes = Vec::new();
    if log.skipped > 0 {
        notes.push(format!(
            "lines that are no records, and were skipped: {}",
            log.skipped
        ));
    }
    if !others.is_empty() {
        let refused = others
            .iter()
            .filter(|r| r.record.outcome == Ended::Refused)
            .count();
        notes.push(format!(
            "{} requests without output, or of another model, are left out ({refused} were refused)",
            others.len()
        ));
    }
    let ready = |known: &Fleet| {
        let there = known.workers.iter().filter(|worker| worker.ready);
        there
            .filter(|worker| fleet.workers.iter().any(|w| w.id == worker.id))
            .count()
    };
    let at_once = log.fleets.iter().map(ready).max().unwrap_or(0);
    if at_once < fleet.workers.len() {
        notes.push(format!(
            "workers were replaced: of {}, at most {at_once} were ready at one time; the replay \
             has each while it was",
            fleet.workers.len()
        ));
    }
    let several = requests
        .iter()
        .filter(|r| r.record.more_choices > 0)
        .count();
    if several > 0 {
        notes.push(format!(
            "requests with several choices, each of which is replayed with one: {several}"
        ));
    }
    let cut = requests
        .iter()
        .filter(|r| r.record.outcome != Ended::Done)
        .count();
    if cut > 0 {
        notes.push(format!(
            "{cut} answers ended early; they are replayed as long as they were"
        ));
    }
    let roles = |fleet: &Fleet| -> BTreeMap<u32, String> {
        fleet
            .workers
            .iter()
            .map(|w| (w.id, w.role.clone()))
            .collect()
    };
    let now = roles(fleet);
    let changed = log.fleets.iter().any(|known| {
        roles(known)
            .iter()
            .any(|(id, role)| now.get(id).is_some_and(|now| now != role))
    });
    if changed {
        notes.push("workers changed their roles; the replay keeps one for each".to_owned());
    }
    if PolicyName::from_str(&log.header.router.policy, true).is_err() {
        notes.push(format!(
            "the policy {} is not known here; the replay uses cost",
            log.header.router.policy
        ));
    }
    notes
}
