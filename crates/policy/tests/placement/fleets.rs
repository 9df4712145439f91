//! Workers and requests, plain ones and random ones.

use proptest::prelude::*;
use tasuki_core::{
    Capabilities, Capacity, HandoffKind, Health, Identity, Indivisible, KvDomain, ModelId,
    Outstanding, ReportedLoad, RequestView, Role, RoleUse, Warm, WorkerId, WorkerView,
};

pub fn domain(identity: u8) -> KvDomain {
    KvDomain {
        backend: "test",
        identity: Identity([identity; 16]),
    }
}

pub fn worker(id: u32, role: Role) -> WorkerView {
    WorkerView {
        id: WorkerId(id),
        domain: domain(1),
        capabilities: Capabilities::default(),
        role,
        hardware: 0,
        machine: 0,
        health: Health::Ready,
        capacity: Capacity {
            max_model_len_tokens: 4_096,
            max_sequences: u32::MAX,
            block_size_tokens: 16,
            total_blocks: 1_000,
        },
        load: ReportedLoad {
            free_blocks: 1_000,
            ..ReportedLoad::default()
        },
        outstanding: Outstanding::default(),
    }
}

pub fn any_role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Mixed)]
}

pub fn any_health() -> impl Strategy<Value = Health> {
    prop_oneof![
        16 => Just(Health::Ready),
        1 => Just(Health::Suspect),
        1 => Just(Health::Draining),
        1 => Just(Health::Down),
    ]
}

pub fn any_capabilities() -> impl Strategy<Value = Capabilities> {
    let handoff = prop_oneof![
        8 => Just(HandoffKind::Concurrent),
        1 => Just(HandoffKind::Ticket),
        1 => Just(HandoffKind::None),
    ];
    (handoff, 0..8u32, 0..8u32, 0..8u32).prop_map(|(handoff, splits, resumes, fixed)| {
        Capabilities {
            role_use: match fixed {
                0 => RoleUse::Only,
                1 => RoleUse::First,
                _ => RoleUse::Discount,
            },
            handoff,
            splits_choices: splits > 0,
            resumes: resumes > 0,
            ..Capabilities::default()
        }
    })
}

/// Of workers of which few are too narrow for the requests here.
pub fn any_max_sequences() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(1), 1 => Just(2), 6 => Just(u32::MAX)]
}

pub fn any_worker(id: u32) -> impl Strategy<Value = WorkerView> {
    // Few values each, so that equal costs are common.
    let load = (
        0..4u32,
        0..4u32,
        (0..4u64).prop_map(|thousands| thousands * 1_000),
        0..1_000u32,
        (0..4u64).prop_map(|thousands| thousands * 10_000),
    );
    let rest = (
        0..3u32,
        0..3u32,
        0..500u64,
        any_capabilities(),
        any_max_sequences(),
    );
    let kind = (
        any_role(),
        any_health(),
        0..3u8,
        0..3u32,
        0..3usize,
        0..4u32,
    );
    (kind, load, rest).prop_map(move |(kind, load, rest)| {
        let (role, health, identity, size, hardware, machine) = kind;
        let mut worker = worker(id, role);
        worker.health = health;
        worker.hardware = hardware;
        worker.machine = machine;
        worker.domain = domain(identity / 2);
        worker.capacity.max_model_len_tokens = 1_024 << size;
        worker.load = ReportedLoad {
            waiting_sequences: load.0,
            awaited_sequences: load.0 / 2,
            running_sequences: load.1,
            waiting_prefill_tokens: load.2,
            free_blocks: load.3,
            running_kv_tokens: load.4,
            waiting_kv_tokens: (load.0 > 1).then_some(5_000 * u64::from(load.0)),
            ..ReportedLoad::default()
        };
        worker.outstanding = Outstanding {
            prefill_tokens: u64::from(rest.0) * 500,
            sequences: rest.1,
            awaited_sequences: rest.1 / 2,
            promised_blocks: rest.2,
            ..Outstanding::default()
        };
        worker.capabilities = rest.3;
        worker.capacity.max_sequences = rest.4;
        if identity == 0 && load.0 > 0 {
            worker.load = ReportedLoad {
                free_blocks: 1_000,
                ..ReportedLoad::default()
            };
            worker.outstanding = Outstanding::default();
        }
        worker
    })
}

pub fn any_request() -> impl Strategy<Value = RequestView> {
    let id = || (0..12u32).prop_map(WorkerId);
    let avoid = proptest::collection::vec(id(), 0..3);
    let warm = proptest::collection::btree_map(id(), 0..4_000u32, 0..4);
    let only = proptest::option::weighted(0.2, proptest::collection::btree_set(id(), 1..12));
    let rest = (1..4u32, avoid, any::<bool>(), warm, only);
    let begun = (0..8u32, 0..8u32, 0..4u32);
    (1..4_000u32, 1..600u32, rest, begun).prop_map(
        |(prompt, output, (choices, avoid, keep_whole, warm, only), (model, identity, resumed))| {
            RequestView {
                model: ModelId(model / 7),
                only: only.map(std::sync::Arc::new),
                bound_to: (identity < 3).then_some(Identity([identity as u8 / 2; 16])),
                resumed_tokens: if resumed == 0 { 1 } else { 0 },
                choices,
                avoid,
                keep_whole: keep_whole && identity % 2 == 0,
                indivisible: match identity % 4 {
                    1 if keep_whole => Some(Indivisible::PromptLogprobs),
                    3 if keep_whole => Some(Indivisible::EchoLogprobs),
                    _ => None,
                },
                warm: warm
                    .into_iter()
                    .map(|(worker, tokens)| Warm { worker, tokens })
                    .collect(),
                ..RequestView::new(prompt, if model == 1 { 1 } else { output })
            }
        },
    )
}
