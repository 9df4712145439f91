//! The phases of a leg inside its worker, as spans below the leg's.
//!
//! Workers send no spans: they need no way to the collector, and their clocks may differ from the
//! router's. They report how long each phase took. Its place in time follows from the leg's span:
//! queue and prefill come first, decode comes last, and no phase leaves the leg.

use std::time::{Duration, SystemTime};

use opentelemetry::KeyValue;
use opentelemetry::trace::{Span as _, SpanContext, SpanKind};
use tasuki_flow::{LegKind, LegTimings};

use super::request::Trace;

/// Submitted to first scheduled.
const QUEUE: &str = "tasuki.worker.queue";
/// First scheduled to first token sampled.
const PREFILL: &str = "tasuki.worker.prefill";
/// From then until the decode worker has all of the KV.
const HANDOFF: &str = "tasuki.worker.handoff";
/// The decode worker's reads: first block posted to last block there.
const TRANSFER: &str = "tasuki.worker.transfer";
/// The KV is there to last token.
const DECODE: &str = "tasuki.worker.decode";

/// A leg that has ended.
pub struct EndedLeg<'a> {
    pub span: &'a SpanContext,
    pub kind: LegKind,
    pub handed_off: bool,
    pub begin: SystemTime,
    pub end: SystemTime,
}

impl EndedLeg<'_> {
    /// Makes the spans. `attributes`: of each.
    pub fn record(&self, trace: &Trace, timings: &LegTimings, attributes: &[KeyValue]) {
        for (name, from, to) in self.phases(timings) {
            let attributes = attributes.to_vec();
            let kind = SpanKind::Internal;
            let mut span = trace.child_of(self.span.clone(), name, kind, from, attributes);
            span.end_with_timestamp(to);
        }
    }

    /// Names, beginnings and ends; phases that did not occur are left out.
    fn phases(&self, timings: &LegTimings) -> Vec<(&'static str, SystemTime, SystemTime)> {
        let (begin, end) = (self.begin, self.end);
        let decode = timings.first_decode.saturating_add(timings.decode);
        let mut phases = match self.kind {
            LegKind::Prefill | LegKind::Colocated => {
                let scheduled = self.after(begin, timings.queue);
                let sampled = self.after(scheduled, timings.prefill);
                let last = match self.handed_off {
                    true => (HANDOFF, sampled, end),
                    false => (DECODE, self.before(end, decode).max(sampled), end),
                };
                vec![
                    (QUEUE, begin, scheduled),
                    (PREFILL, scheduled, sampled),
                    last,
                ]
            }
            LegKind::Decode => {
                let there = self.before(end, decode);
                let posted = self.before(there, timings.transfer);
                // Until then it waits for the prefill worker.
                vec![(TRANSFER, posted, there), (DECODE, there, end)]
            }
        };
        phases.retain(|(_, from, to)| from < to);
        phases
    }

    fn after(&self, at: SystemTime, time: Duration) -> SystemTime {
        at.checked_add(time).map_or(self.end, |at| at.min(self.end))
    }

    fn before(&self, at: SystemTime, time: Duration) -> SystemTime {
        let before = at.checked_sub(time);
        before.map_or(self.begin, |at| at.max(self.begin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The phases of a leg from 10 s to 20 s, in seconds.
    fn phases(kind: LegKind, handed_off: bool, timings: &LegTimings) -> Vec<(&str, u64, u64)> {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let leg = EndedLeg {
            span: &SpanContext::NONE,
            kind,
            handed_off,
            begin: at(10),
            end: at(20),
        };
        let seconds = |at: SystemTime| {
            let since = at.duration_since(SystemTime::UNIX_EPOCH);
            since.expect("later").as_secs()
        };
        let phases = leg.phases(timings).into_iter();
        let phases = phases.map(|(name, from, to)| (name, seconds(from), seconds(to)));
        phases.collect()
    }

    fn timings(queue: u64, prefill: u64, transfer: u64, decode: u64) -> LegTimings {
        LegTimings {
            queue: Duration::from_secs(queue),
            prefill: Duration::from_secs(prefill),
            transfer: Duration::from_secs(transfer),
            decode: Duration::from_secs(decode),
            ..LegTimings::default()
        }
    }

    #[test]
    fn phases_have_their_place_in_the_leg() {
        assert_eq!(
            phases(LegKind::Prefill, true, &timings(2, 5, 0, 0)),
            [(QUEUE, 10, 12), (PREFILL, 12, 17), (HANDOFF, 17, 20)]
        );
        assert_eq!(
            phases(LegKind::Decode, false, &timings(7, 0, 3, 4)),
            [(TRANSFER, 13, 16), (DECODE, 16, 20)]
        );
        assert_eq!(
            phases(LegKind::Colocated, false, &timings(1, 2, 0, 6)),
            [(QUEUE, 10, 11), (PREFILL, 11, 13), (DECODE, 14, 20)]
        );
        let first = LegTimings {
            first_decode: Duration::from_secs(1),
            ..timings(0, 0, 2, 4)
        };
        assert_eq!(
            phases(LegKind::Decode, false, &first),
            [(TRANSFER, 13, 15), (DECODE, 15, 20)]
        );
    }

    #[test]
    fn phases_stay_within_the_leg() {
        assert_eq!(
            phases(LegKind::Prefill, true, &timings(4, 60, 0, 0)),
            [(QUEUE, 10, 14), (PREFILL, 14, 20)]
        );
        assert_eq!(
            phases(LegKind::Colocated, false, &timings(1, 6, 0, 9)),
            [(QUEUE, 10, 11), (PREFILL, 11, 17), (DECODE, 17, 20)]
        );
        assert_eq!(
            phases(LegKind::Decode, false, &timings(0, 0, 60, 4)),
            [(TRANSFER, 10, 16), (DECODE, 16, 20)]
        );
        let endless = timings(u64::MAX, u64::MAX, u64::MAX, u64::MAX);
        assert_eq!(phases(LegKind::Decode, false, &endless), [(DECODE, 10, 20)]);
        assert_eq!(phases(LegKind::Prefill, true, &endless), [(QUEUE, 10, 20)]);
        assert!(phases(LegKind::Decode, false, &LegTimings::default()).is_empty());
    }
}
