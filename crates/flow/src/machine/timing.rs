//! A request's timings from those of its legs.

use std::time::Duration;

use crate::generation::Timings;
use crate::leg::{LegKind, LegTimings};

/// Durations of phases, summed over the attempts of a group, which follow one another.
#[derive(Debug, Clone, Default)]
pub struct PhaseSums {
    handshake: Duration,
    transfer: Duration,
    transfer_exposed: Duration,
    transfer_tail: Duration,
    transfer_post: Duration,
    decode: Duration,
}

impl PhaseSums {
    /// Groups run side by side: the client waits for the longest.
    fn count_in(&self, timings: &mut Timings) {
        timings.handshake = timings.handshake.max(self.handshake);
        timings.transfer = timings.transfer.max(self.transfer);
        timings.transfer_exposed = timings.transfer_exposed.max(self.transfer_exposed);
        timings.transfer_tail = timings.transfer_tail.max(self.transfer_tail);
        timings.transfer_post = timings.transfer_post.max(self.transfer_post);
        timings.decode = timings.decode.max(self.decode);
    }
}

/// Adds a leg's timings to its group's sums and to the request's.
///
/// First decode is that of the first leg that reached it.
pub fn add(
    timings: &mut Timings,
    phases: &mut PhaseSums,
    leg: &LegTimings,
    kind: LegKind,
    before_submit: Duration,
) {
    if kind != LegKind::Decode {
        add_prefill(timings, leg, before_submit);
    }
    if kind != LegKind::Prefill {
        phases.handshake += leg.handshake;
        phases.transfer += leg.transfer;
        phases.transfer_exposed += leg.transfer_exposed;
        phases.transfer_tail += leg.transfer_tail;
        phases.transfer_post += leg.transfer_post;
        phases.decode += leg.decode;
        phases.count_in(timings);
        timings.transfer_bytes += leg.transfer_bytes;
        timings.transfer_descriptors += leg.transfer_descriptors;
        if !leg.transport.is_empty() {
            timings.transport.clone_from(&leg.transport);
        }
        if timings.first_decode.is_zero() {
            timings.first_decode = leg.first_decode;
        }
    }
}

/// What is known with the first token: queue and prefill of the first leg that reached it.
///
/// A lost leg may have sent the first token without its timings. An attempt after it says nothing
/// of the first token: its queue and prefill are part of the recovery.
pub fn add_prefill(timings: &mut Timings, leg: &LegTimings, before_submit: Duration) {
    let too_late = !timings.first_token.is_zero() && before_submit > timings.first_token;
    if timings.prefill.is_zero() && !leg.prefill.is_zero() && !too_late {
        timings.queue = before_submit + leg.queue;
        timings.prefill = leg.prefill;
    }
}

/// What is known at the end: the messages between the first two tokens, or of a request that was
/// placed again the time that no phase has.
pub fn add_rest(timings: &mut Timings, second_token: Option<Duration>) {
    if timings.replacements > 0 {
        timings.recovery = timings
            .total
            .saturating_sub(timings.first_token)
            .saturating_sub(timings.transfer_exposed)
            .saturating_sub(timings.first_decode)
            .saturating_sub(timings.decode);
    } else if let Some(second_token) = second_token {
        timings.messages = second_token
            .saturating_sub(timings.first_token)
            .saturating_sub(timings.transfer_exposed)
            .saturating_sub(timings.first_decode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(value: f64) -> Duration {
        Duration::from_secs_f64(value)
    }

    #[test]
    fn parts_add_up() {
        let mut timings = Timings::default();
        let prefill = LegTimings {
            queue: seconds(0.5),
            prefill: seconds(1.0),
            transfer_bytes: 7,
            ..Default::default()
        };
        let decode = LegTimings {
            queue: seconds(9.0),
            prefill: seconds(9.0),
            handshake: seconds(0.125),
            transfer: seconds(0.25),
            transfer_post: seconds(0.125),
            transfer_descriptors: 3,
            transport: "tcp".to_owned(),
            first_decode: seconds(0.5),
            decode: seconds(2.0),
            transfer_bytes: 100,
            ..Default::default()
        };
        let waited = Duration::from_millis(250);
        let mut phases = PhaseSums::default();
        add(
            &mut timings,
            &mut phases,
            &prefill,
            LegKind::Prefill,
            waited,
        );
        add(&mut timings, &mut phases, &decode, LegKind::Decode, waited);
        add(&mut timings, &mut phases, &decode, LegKind::Decode, waited);
        let unmoved = LegTimings::default();
        add(&mut timings, &mut phases, &unmoved, LegKind::Decode, waited);
        assert_eq!(timings.queue, Duration::from_millis(750));
        assert_eq!(timings.prefill, Duration::from_secs(1));
        assert_eq!(timings.handshake, Duration::from_millis(250));
        assert_eq!(timings.first_decode, Duration::from_millis(500));
        assert_eq!(timings.decode, Duration::from_secs(4));
        assert_eq!(timings.transfer_bytes, 200);
        assert_eq!(timings.transfer_post, Duration::from_millis(250));
        assert_eq!(timings.transfer_descriptors, 6);
        assert_eq!(timings.transport, "tcp");
    }

    #[test]
    fn an_attempt_after_the_first_token_has_no_part_in_it() {
        let mut timings = Timings {
            first_token: seconds(0.5),
            ..Default::default()
        };
        let mut leg = LegTimings {
            queue: seconds(0.125),
            prefill: seconds(1.0),
            ..Default::default()
        };
        add_prefill(&mut timings, &leg, seconds(8.0));
        assert_eq!((timings.queue, timings.prefill), Default::default());
        leg.prefill = seconds(0.25);
        add_prefill(&mut timings, &leg, seconds(0.0625));
        assert_eq!(
            (timings.queue, timings.prefill),
            (seconds(0.1875), seconds(0.25))
        );
    }

    #[test]
    fn what_the_decode_worker_cannot_know_is_messages() {
        let ms = Duration::from_millis;
        let mut timings = Timings {
            first_token: ms(40),
            transfer_exposed: ms(1),
            first_decode: ms(12),
            ..Default::default()
        };
        add_rest(&mut timings, None);
        assert_eq!(timings.messages, Duration::ZERO);
        add_rest(&mut timings, Some(ms(56)));
        assert_eq!(timings.messages, ms(3));
        add_rest(&mut timings, Some(ms(50))); // clocks do not run alike
        assert_eq!(timings.messages, Duration::ZERO);
    }

    #[test]
    fn of_groups_side_by_side_the_longest_counts() {
        let mut timings = Timings::default();
        let decoded = |decode_s| LegTimings {
            decode: seconds(decode_s),
            transfer: seconds(0.25),
            transfer_bytes: 100,
            ..Default::default()
        };
        let mut whole = PhaseSums::default();
        add(
            &mut timings,
            &mut whole,
            &decoded(1.0),
            LegKind::Decode,
            Duration::ZERO,
        );
        let (mut one, mut other) = (whole.clone(), whole);
        add(
            &mut timings,
            &mut one,
            &decoded(3.0),
            LegKind::Decode,
            Duration::ZERO,
        );
        add(
            &mut timings,
            &mut other,
            &decoded(2.0),
            LegKind::Decode,
            Duration::ZERO,
        );
        assert_eq!(timings.decode, Duration::from_secs(4));
        assert_eq!(timings.transfer, Duration::from_millis(500));
        assert_eq!(timings.transfer_bytes, 300);
    }

    #[test]
    fn what_no_phase_has_of_a_request_that_was_placed_again_is_recovery() {
        let ms = Duration::from_millis;
        let mut timings = Timings {
            first_token: ms(40),
            transfer_exposed: ms(1),
            first_decode: ms(5),
            decode: ms(100),
            total: ms(846),
            replacements: 1,
            ..Default::default()
        };
        add_rest(&mut timings, Some(ms(56)));
        assert_eq!((timings.recovery, timings.messages), (ms(700), ms(0)));
        timings.replacements = 0;
        timings.recovery = ms(0);
        add_rest(&mut timings, Some(ms(56)));
        assert_eq!((timings.recovery, timings.messages), (ms(0), ms(10)));
    }
}
