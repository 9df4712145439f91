//! Changes that save next to nothing.

use super::*;

/// Idle, so that a change of its role takes nothing.
#[test]
fn a_change_that_saves_next_to_nothing_is_not_made() {
    let workers = [(Role::Decode, 0.0), (Role::Mixed, 0.0)];
    let order = decide(&look(task(1.0, 500.0, 100.0), &workers));
    let saves = order.as_ref().map(|order| order.reason.to_string());
    assert_eq!(order, None, "{saves:?}");
    let more = decide(&look(task(8.0, 500.0, 100.0), &workers)).expect("it pays");
    assert!(more.reason.gain_s() > 0.5, "{}", more.reason);
}
