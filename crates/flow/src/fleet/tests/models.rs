//! Which workers serve which model, and which weights.

use tasuki_policy::Rule;

use super::*;

#[test]
fn a_router_keeps_the_model_of_its_first_worker_though_that_is_gone() {
    let mut fleet = fleet(1);
    let first = fleet
        .join(WorkerId(0), info("a"), NOW)
        .expect("the first one is admitted");
    fleet.leave(first);
    let other = WorkerInfo {
        model: "large".to_owned(),
        domain: domain(8),
        ..info("b")
    };
    let refused = fleet
        .join(WorkerId(0), other, NOW)
        .expect_err("another model");
    assert!(matches!(refused, JoinError::OtherModel { .. }), "{refused}");
    assert!(refused.to_string().contains("\"large\""), "{refused}");
    let bfloat16 = WorkerInfo {
        domain: domain(9),
        ..info("c")
    };
    fleet
        .join(WorkerId(0), bfloat16, NOW)
        .expect("the same model in another dtype is admitted");
}

#[test]
fn one_router_serves_one_model() {
    let mut fleet = fleet(2);
    let mut join = |worker, engine: &str, model: &str, identity| {
        let info = WorkerInfo {
            model: model.to_owned(),
            domain: domain(identity),
            ..info(engine)
        };
        let joined = fleet.join(WorkerId(worker), info, NOW);
        if let (Ok(key), 1) = (&joined, worker) {
            fleet.leave(*key);
        }
        joined
    };
    join(0, "a", "m", 1).expect("joined");
    let error = join(1, "b", "other", 2).expect_err("another model");
    let says = "\"other\", the workers before it \"m\"";
    assert!(error.to_string().contains(says), "{error}");
    join(1, "b", "other", 1).expect("the same under another name");
    join(1, "b", "m", 2).expect("another dtype");
}

/// A fleet of two models with a worker of each pair of model and identity.
fn of_models(workers: &[(&str, u8)]) -> (FleetState, Vec<WorkerKey>) {
    let names = [["small", "tiny"], ["large", "big"]];
    let models = names.map(|names| names.map(str::to_owned).to_vec());
    let mut fleet = FleetState::new(models.to_vec(), PolicyConfig::default());
    let keys = workers.iter().map(|&(model, identity)| {
        let id = fleet.add();
        let info = WorkerInfo {
            model: model.to_owned(),
            domain: domain(identity),
            ..info(&format!("e{id}"))
        };
        fleet.join(id, info, NOW).expect("joined")
    });
    let keys = keys.collect();
    (fleet, keys)
}

fn request(model: u32, bound_to: Option<u8>) -> RequestView {
    RequestView {
        model: ModelId(model),
        bound_to: bound_to.map(|byte| Identity([byte; 16])),
        ..RequestView::new(10, 5)
    }
}

#[test]
fn requests_go_to_workers_of_their_model_by_any_of_its_names() {
    let (mut fleet, keys) = of_models(&[("small", 1), ("big", 2), ("tiny", 1)]);
    let mut place = |model| {
        let Placed {
            prefill, decode, ..
        } = fleet.place(&request(model, None))?;
        Ok::<_, NoPlacement>([prefill.key.worker.0, decode.key.worker.0])
    };
    for _ in 0..4 {
        assert!(place(0).is_ok_and(|pair| pair.iter().all(|&id| id != 1)));
        assert_eq!(place(1), Ok([1, 1]));
    }
    fleet.leave(keys[1]);
    assert_eq!(fleet.place(&request(1, None)), Err(NoPlacement::NoWorker));
    assert!(
        fleet.place(&request(0, None)).is_ok(),
        "the other one serves on"
    );
    let id = fleet.add();
    let joined = fleet.join(id, info("x"), NOW);
    assert!(joined.is_ok(), "tiny is a name of the first model");
    let stranger = WorkerInfo {
        model: "huge".to_owned(),
        ..info("y")
    };
    let id = fleet.add();
    let refused = fleet.join(id, stranger, NOW).expect_err("not served");
    let says = "serves \"huge\", this router serves [\"small\", \"large\"]";
    assert!(refused.to_string().contains(says), "{refused}");
}

#[test]
fn a_begun_request_stays_with_its_weights_and_kv_never_moves_between_two() {
    let roles = [Role::Prefill, Role::Decode, Role::Prefill];
    let mut fleet = fleet(3);
    // Short requests are split too.
    fleet.costs.config.role_preference = 1_000.0;
    for ((id, role), identity) in (0u32..).zip(roles).zip([1, 1, 2]) {
        let info = WorkerInfo {
            role,
            domain: domain(identity),
            ..info(&format!("e{id}"))
        };
        fleet.join(WorkerId(id), info, NOW).expect("joined");
    }
    let placed = |fleet: &mut FleetState, bound_to| {
        let Placed {
            prefill, decode, ..
        } = fleet.place(&request(0, bound_to))?;
        Ok::<_, NoPlacement>((prefill.key.worker.0, decode.key.worker.0))
    };
    for _ in 0..4 {
        let pair = placed(&mut fleet, None).expect("a pair");
        assert!(pair == (0, 1) || pair.0 == pair.1, "{pair:?}");
        assert_eq!(placed(&mut fleet, Some(1)), Ok((0, 1)));
        assert_eq!(placed(&mut fleet, Some(2)), Ok((2, 2)));
    }
    fleet.drain(WorkerId(2), DrainReason::Asked);
    assert_eq!(placed(&mut fleet, Some(2)), Err(NoPlacement::AllDraining));
    fleet.remove(WorkerId(2));
    let refused = placed(&mut fleet, Some(2)).expect_err("other weights are left");
    assert_eq!(refused, NoPlacement::OtherIdentity);
    assert!(refused.may_pass());
    assert!(refused.to_string().contains("other weights"), "{refused}");
}

fn opaque(engine: &str, model: &str, further: &[&str]) -> WorkerInfo {
    WorkerInfo {
        model: model.to_owned(),
        further_names: further.iter().copied().map(str::to_owned).collect(),
        capabilities: Capabilities {
            payload: Payload::Opaque,
            resumes: false,
            ..Capabilities::default()
        },
        ..info(engine)
    }
}

#[test]
fn models_of_opaque_workers_become_known_with_them() {
    let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
    let mut join = |info| {
        let id = fleet.add();
        let key = fleet.join(id, info, NOW)?;
        Ok::<_, JoinError>((key, fleet.worker(id).and_then(|worker| worker.model)))
    };
    let (first, model) = join(opaque("a", "m", &["lora"])).expect("joined");
    assert_eq!(model, Some(ModelId(0)));
    let (_, same) = join(opaque("b", "lora2", &["m"])).expect("joined");
    let (_, other) = join(opaque("c", "n", &[])).expect("joined");
    assert_eq!((same, other), (Some(ModelId(0)), Some(ModelId(1))));
    let refused = join(info("d")).expect_err("no model has its text side here");
    assert!(matches!(refused, JoinError::NotServed { .. }), "{refused}");
    let refused = join(WorkerInfo {
        model: "m".to_owned(),
        ..info("e")
    });
    let refused = refused.expect_err("another kind").to_string();
    let says = "\"m\" is served by workers of another engine here, and this is a worker of Tasuki";
    assert!(refused.contains(says), "{refused}");
    fleet.leave(first);
    let known: Vec<_> = fleet
        .opaque_models()
        .map(|model| (model.id.0, model.names.join(" ")))
        .collect();
    assert_eq!(known, [(0, "m lora lora2".to_owned()), (1, "n".to_owned())]);
}

#[test]
fn a_worker_may_have_very_many_names() {
    let adapters: Vec<String> = (0..100_000).map(|at| format!("adapter-{at}")).collect();
    let adapters: Vec<&str> = adapters.iter().map(String::as_str).collect();
    let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
    for engine in ["a", "b"] {
        // Were each name compared with each other one, that would take most of a minute.
        let id = fleet.add();
        fleet
            .join(id, opaque(engine, "m", &adapters), NOW)
            .expect("joined");
    }
    let known: Vec<_> = fleet
        .opaque_models()
        .map(|model| model.names.len())
        .collect();
    assert_eq!(known, [100_001]);
}

#[test]
fn the_estimated_length_of_an_opaque_request_is_no_limit() {
    let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
    let id = fleet.add();
    fleet.join(id, opaque("a", "m", &[]), NOW).expect("joined");
    assert!(fleet.place(&RequestView::new(1_000_000, 5)).is_ok());
}

fn with_adapters(engine: &str, model: &str, adapters: &[&str]) -> WorkerInfo {
    WorkerInfo {
        adapters: adapters.iter().copied().map(str::to_owned).collect(),
        ..opaque(engine, model, &[])
    }
}

fn named(name: &str) -> RequestView {
    RequestView {
        adapters: vec![name.into()],
        ..request(0, None)
    }
}

#[test]
fn a_request_for_an_adapter_goes_to_workers_that_have_it() {
    for kind in [PolicyKind::Cost, PolicyKind::Simple(Rule::RoundRobin)] {
        let policy = PolicyConfig {
            kind,
            ..PolicyConfig::default()
        };
        let mut fleet = FleetState::new(Vec::new(), policy);
        let mut join = |engine: &str, adapters: &[&str]| {
            let id = fleet.add();
            let info = with_adapters(engine, "m", adapters);
            fleet.join(id, info, NOW).expect("joined")
        };
        let keys = [join("a", &[]), join("b", &["x"]), join("c", &["y"])];
        let place = |fleet: &mut FleetState, name: &str| {
            let placed = fleet.place(&named(name))?;
            assert_eq!(placed.prefill, placed.decode);
            Ok::<_, NoPlacement>(placed.prefill.key.worker.0)
        };
        for _ in 0..10 {
            assert_eq!(place(&mut fleet, "x"), Ok(1));
            assert_eq!(place(&mut fleet, "y"), Ok(2));
        }
        let mut others: Vec<_> = (0..30).map(|_| place(&mut fleet, "m")).collect();
        others.sort_by_key(|placed| placed.ok());
        others.dedup();
        assert_eq!(others.len(), 3, "the base is everywhere");
        fleet.leave(keys[1]);
        assert_eq!(place(&mut fleet, "x"), Err(NoPlacement::NoAdapter));
        assert!(fleet.on_info(keys[0], with_adapters("a", "m", &["x"])));
        assert_eq!(place(&mut fleet, "x"), Ok(0));
        assert!(fleet.on_info(keys[0], with_adapters("a", "m", &[])));
        fleet.remove(WorkerId(1));
        assert!(place(&mut fleet, "x").is_ok(), "nobody is known to have it");
    }
}

#[test]
fn a_batch_for_several_adapters_goes_to_workers_that_have_all() {
    let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
    for (at, adapters) in [&["x"][..], &["x", "y"], &["y"], &["z"]].iter().enumerate() {
        let id = fleet.add();
        let info = with_adapters(&format!("e{at}"), "m", adapters);
        fleet.join(id, info, NOW).expect("joined");
    }
    let mut place = |names: &[&str]| {
        let request = RequestView {
            adapters: names.iter().map(|&name| name.into()).collect(),
            ..request(0, None)
        };
        let placed = fleet.place(&request);
        placed.map(|placed| placed.prefill.key.worker.0)
    };
    for _ in 0..10 {
        assert_eq!(place(&["x", "y"]), Ok(1));
        assert_eq!(place(&["z", "unknown"]), Ok(3), "its worker says so");
        assert_eq!(place(&["x", "z"]), Err(NoPlacement::NoAdapter));
    }
}

#[test]
fn an_adapter_of_workers_that_may_not_take_the_request_does_not_count() {
    let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
    for (engine, identity, adapters) in [("a", 7, &["x"]), ("b", 8, &["y"])] {
        let id = fleet.add();
        let info = WorkerInfo {
            domain: domain(identity),
            ..with_adapters(engine, "m", adapters)
        };
        fleet.join(id, info, NOW).expect("joined");
    }
    for (names, expected) in [
        (&["y"][..], Ok(1)),
        (&["x"], Ok(1)),
        (&["x", "y"], Ok(1)),
        (&[], Ok(1)),
    ] {
        let request = RequestView {
            adapters: names.iter().map(|&name| name.into()).collect(),
            bound_to: Some(domain(8).identity),
            ..request(0, None)
        };
        let placed = fleet.place(&request);
        let placed = placed.map(|placed| placed.prefill.key.worker.0);
        assert_eq!(placed, expected, "{names:?}");
    }
}

#[test]
fn both_workers_of_a_pair_have_the_adapter() {
    let policy = PolicyConfig {
        strict_roles: true,
        ..PolicyConfig::default()
    };
    let mut fleet = FleetState::new(Vec::new(), policy);
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    for (id, role) in (0u32..).zip(roles) {
        let worker = fleet.add();
        let adapters: &[&str] = if id % 2 == 1 { &["x"] } else { &[] };
        let info = WorkerInfo {
            role,
            ..with_adapters(&format!("e{id}"), "m", adapters)
        };
        fleet.join(worker, info, NOW).expect("joined");
    }
    let mut prefill = None;
    for _ in 0..10 {
        let placed = fleet.place(&named("x")).expect("a pair");
        let pair = [placed.prefill.key.worker.0, placed.decode.key.worker.0];
        assert_eq!(pair, [1, 3]);
        prefill = Some(placed.prefill.key);
    }
    let prefill = prefill.expect("it was placed");
    let next = fleet.place_decode(&named("x"), prefill, &[WorkerId(3)]);
    assert_eq!(next, None, "the other decode worker lacks it");
    let next = fleet.place_decode(&named("m"), prefill, &[WorkerId(3)]);
    assert_eq!(next.map(|next| next.key.worker.0), Some(2));
    fleet.drain(WorkerId(3), DrainReason::Asked);
    let refused = fleet.place(&named("x")).expect_err("no decode worker");
    assert_eq!(refused, NoPlacement::NoAdapter);
    assert!(refused.may_pass());
}

#[test]
fn adapters_are_forgotten_with_the_last_worker_that_had_them() {
    let mut fleet = FleetState::new(Vec::new(), PolicyConfig::default());
    let mut join = |info| {
        let id = fleet.add();
        fleet.join(id, info, NOW).expect("joined")
    };
    let first = join(with_adapters("a", "m", &["x", "y"]));
    join(with_adapters("b", "m", &["x"]));
    join(with_adapters("c", "n", &["y"]));
    let adapters = |fleet: &FleetState| {
        let models = fleet.opaque_models();
        let adapters = models.map(|model| model.adapters.into_iter().cloned().collect::<Vec<_>>());
        adapters.map(|names| names.join(" ")).collect::<Vec<_>>()
    };
    assert_eq!(adapters(&fleet), ["x y", ""]);
    fleet.leave(first);
    assert_eq!(adapters(&fleet), ["x y", ""], "it may come back");
    fleet.remove(WorkerId(0));
    assert_eq!(adapters(&fleet), ["x", "y"]);
    fleet.remove(WorkerId(1));
    assert_eq!(adapters(&fleet), ["", "y"]);
    // A model has its name, whatever adapters were called.
    let id = fleet.add();
    fleet.join(id, opaque("d", "y", &[]), NOW).expect("joined");
    assert_eq!(adapters(&fleet), ["", "", ""]);
}
