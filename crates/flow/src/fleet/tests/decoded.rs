//! When the workers of a model decoded last.

use super::*;

#[test]
fn only_tokens_of_legs_that_decode_count() {
    let mut fleet = fleet(2);
    let at = Duration::from_secs;
    let mut tokens_of = |worker: u32, kind, second| {
        let engine = format!("e{worker}");
        let known = fleet.join(WorkerId(worker), info(&engine), NOW);
        let key = known.expect("joined");
        let leg = fleet.on_dispatched(key, &spec(kind, 10)).expect("sent");
        fleet.on_report(key, Some(&idle()), at(second));
        fleet.on_output(key, leg, 0, 0);
        assert!(fleet.last_decoded(ModelId(0)) < Some(at(second)));
        fleet.on_output(key, leg, 1, 0);
        fleet.last_decoded(ModelId(0))
    };
    assert_eq!(tokens_of(0, LegKind::Prefill, 1), None);
    assert_eq!(tokens_of(1, LegKind::Decode, 2), Some(at(2)));
    assert_eq!(fleet.last_decoded(ModelId(1)), None);
}
