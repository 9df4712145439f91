//! What a request does that waits for one worker while another has time.

use super::*;
use crate::FleetState;
use crate::fleet::LoadReport;
use crate::testing::info;
use tasuki_policy::PolicyConfig;

#[test]
fn no_request_waits_long_for_a_worker_while_another_has_time_for_its_prompt() {
    let mut fleet = FleetState::new(vec![Vec::new()], PolicyConfig::default());
    // One with prompts, and one where a prompt would stall many that decode.
    for (name, waiting_prefill_tokens, running_sequences) in [("a", 1_600, 0), ("b", 0, 60)] {
        let id = fleet.add();
        let mut info = info(name);
        info.num_blocks = 100_000;
        let key = fleet.join(id, info, Duration::ZERO).expect("it joins");
        let load = LoadReport {
            running_requests: 1,
            waiting_prefill_tokens,
            running_sequences,
            running_kv_tokens: 500 * u64::from(running_sequences),
            free_blocks: 90_000,
            ..LoadReport::default()
        };
        fleet.on_report(key, Some(&load), Duration::ZERO);
        fleet.recount(key);
    }
    let entrant = Entrant {
        view: RequestView::new(200, 20),
        tenant: "a".into(),
        priority: 0,
        arrived: Duration::from_secs(1),
    };
    let view = entrant.view.clone();
    let mut admission = Admission::new(AdmissionConfig::default());
    let id = admission.enter(entrant, &fleet);
    for waited_s in [0.0, 0.5] {
        let now = Duration::from_secs_f64(1.0 + waited_s);
        assert_eq!(admission.settle(now, &fleet), [], "after {waited_s} s");
    }
    let verdicts = admission.settle(Duration::from_secs(6), &fleet);
    assert!(
        matches!(verdicts[..], [(let_in, Verdict::Admitted(_))] if let_in == id),
        "{verdicts:?}"
    );
    // Its machine places it as it was let in.
    let placed = fleet.place(&view.after(Duration::from_secs(5)));
    assert_eq!(placed.expect("a worker").prefill.key.worker, WorkerId(1));
}
