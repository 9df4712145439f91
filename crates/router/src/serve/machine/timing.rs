//! A request's timings from those of its legs.

use std::time::Duration;

use tasuki_wire::v1;

use super::io::Part;
use crate::serve::api::Timings;

/// What the attempts of a group, one after another, took to move and decode KV.
#[derive(Debug, Clone, Default)]
pub struct Account {
    handshake: Duration,
    transfer: Duration,
    transfer_exposed: Duration,
    transfer_tail: Duration,
    decode: Duration,
}

impl Account {
    /// Groups run side by side: the client waits for the longest.
    fn count(&self, timings: &mut Timings) {
        timings.handshake = timings.handshake.max(self.handshake);
        timings.transfer = timings.transfer.max(self.transfer);
        timings.transfer_exposed = timings.transfer_exposed.max(self.transfer_exposed);
        timings.transfer_tail = timings.transfer_tail.max(self.transfer_tail);
        timings.decode = timings.decode.max(self.decode);
    }
}

/// Adds a leg's account to its group's and to the request's.
///
/// First decode is that of the first leg that got so far.
pub fn add(
    timings: &mut Timings,
    account: &mut Account,
    leg: &v1::LegTimings,
    part: Part,
    before_submit: Duration,
) {
    if part != Part::Decode {
        add_prefill(timings, leg, before_submit);
    }
    if part != Part::Prefill {
        account.handshake += seconds(leg.handshake_s);
        account.transfer += seconds(leg.transfer_s);
        account.transfer_exposed += seconds(leg.transfer_exposed_s);
        account.transfer_tail += seconds(leg.transfer_tail_s);
        account.decode += seconds(leg.decode_s);
        account.count(timings);
        timings.transfer_bytes += leg.transfer_bytes;
        if timings.first_decode.is_zero() {
            timings.first_decode = seconds(leg.first_decode_s);
        }
    }
}

/// What is known with the first token: queue and prefill of the first leg that got so far.
pub fn add_prefill(timings: &mut Timings, leg: &v1::LegTimings, before_submit: Duration) {
    if timings.prefill.is_zero() && leg.prefill_s > 0.0 {
        timings.queue = before_submit + seconds(leg.queue_s);
        timings.prefill = seconds(leg.prefill_s);
    }
}

/// What is known once all legs have told: what lies between the first two tokens besides.
pub fn add_messages(timings: &mut Timings, second_token: Option<Duration>) {
    if let Some(second_token) = second_token {
        timings.messages = second_token
            .saturating_sub(timings.first_token)
            .saturating_sub(timings.transfer_exposed)
            .saturating_sub(timings.first_decode);
    }
}

/// A worker's number of seconds; nonsense counts as none.
fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up() {
        let mut timings = Timings::default();
        let prefill = v1::LegTimings {
            queue_s: 0.5,
            prefill_s: 1.0,
            transfer_bytes: 7,
            ..Default::default()
        };
        let decode = v1::LegTimings {
            queue_s: 9.0,
            prefill_s: 9.0,
            handshake_s: 0.125,
            transfer_s: 0.25,
            first_decode_s: 0.5,
            decode_s: 2.0,
            transfer_bytes: 100,
            ..Default::default()
        };
        let waited = Duration::from_millis(250);
        let mut account = Account::default();
        add(&mut timings, &mut account, &prefill, Part::Prefill, waited);
        add(&mut timings, &mut account, &decode, Part::Decode, waited);
        add(&mut timings, &mut account, &decode, Part::Decode, waited);
        assert_eq!(timings.queue, Duration::from_millis(750));
        assert_eq!(timings.prefill, Duration::from_secs(1));
        assert_eq!(timings.handshake, Duration::from_millis(250));
        assert_eq!(timings.first_decode, Duration::from_millis(500));
        assert_eq!(timings.decode, Duration::from_secs(4));
        assert_eq!(timings.transfer_bytes, 200);
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
        add_messages(&mut timings, None);
        assert_eq!(timings.messages, Duration::ZERO);
        add_messages(&mut timings, Some(ms(56)));
        assert_eq!(timings.messages, ms(3));
        add_messages(&mut timings, Some(ms(50))); // clocks do not run alike
        assert_eq!(timings.messages, Duration::ZERO);
    }

    #[test]
    fn of_groups_side_by_side_the_longest_counts() {
        let mut timings = Timings::default();
        let decoded = |seconds| v1::LegTimings {
            decode_s: seconds,
            transfer_s: 0.25,
            transfer_bytes: 100,
            ..Default::default()
        };
        let mut whole = Account::default();
        add(
            &mut timings,
            &mut whole,
            &decoded(1.0),
            Part::Decode,
            Duration::ZERO,
        );
        let (mut one, mut other) = (whole.clone(), whole);
        add(
            &mut timings,
            &mut one,
            &decoded(3.0),
            Part::Decode,
            Duration::ZERO,
        );
        add(
            &mut timings,
            &mut other,
            &decoded(2.0),
            Part::Decode,
            Duration::ZERO,
        );
        assert_eq!(timings.decode, Duration::from_secs(4));
        assert_eq!(timings.transfer, Duration::from_millis(500));
        assert_eq!(timings.transfer_bytes, 300);
    }

    #[test]
    fn nonsense_counts_as_none() {
        let mut timings = Timings::default();
        let leg = v1::LegTimings {
            prefill_s: f64::INFINITY,
            decode_s: f64::NAN,
            handshake_s: -1.0,
            ..Default::default()
        };
        add(
            &mut timings,
            &mut Account::default(),
            &leg,
            Part::Whole,
            Duration::ZERO,
        );
        assert_eq!(
            timings.decode + timings.handshake + timings.prefill,
            Duration::ZERO
        );
    }
}
