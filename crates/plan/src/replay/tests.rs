//! A log of a simulated run is replayed: it must come out as it was.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};
use tasuki_core::{ChunkScheme, Chunks, Identity, Rates, Role};
use tasuki_reqlog::{
    Class, Ended, Fleet, Handoff, Hooks, Keep, Record, RequestLog, Router, Worker,
};
use tasuki_sim::steps::StepModel;
use tasuki_sim::{Config, Limits, LinkSpec, NetworkSpec, Outcome, Request, Time, WorkerConfig};

use super::*;
use crate::deployment::policy;

const RATES: Rates = Rates {
    step_s: 6e-3,
    sequence_s: 2e-5,
    kv_token_s: 3e-8,
    prompt_step_s: 6e-3,
    prompt_token_s: 2e-5,
    prompt_square_s: 2e-10,
};
const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];
const BYTES: f64 = 1e5;

/// Every third prompt begins like the first, for 1,024 tokens.
pub(super) fn requests() -> Vec<Request> {
    let request = |index: usize| {
        let tokens = 1_200 + (index * 131 % 900) as u32;
        let name = |chunk: u64| match (index % 3, chunk) {
            (0, 0..8) => chunk,
            _ => 1_000 * (index as u64 + 1) + chunk,
        };
        Request {
            chunks: (0..u64::from(tokens / 128)).map(name).collect(),
            ..Request::new(
                index,
                Time::from_s(0.05 * index as f64),
                tokens,
                20 + (index * 7 % 60) as u32,
            )
        }
    };
    (0..240).map(request).collect()
}

pub(super) fn served(requests: &[Request]) -> Run {
    let worker = |(role, host)| WorkerConfig {
        role,
        host,
        class: "x".into(),
        steps: Arc::new(StepModel::Rates(RATES)),
        limits: Limits::gpu(8_000, 16_384),
    };
    let config = Config {
        workers: ROLES.into_iter().zip([1, 1]).map(worker).collect(),
        policy: policy(&router_args(), true),
        network: NetworkSpec {
            within_host: LinkSpec {
                bytes_per_s: 2e10,
                latency_s: 5e-4,
            },
            ..NetworkSpec::default()
        },
        kv_bytes_per_token: BYTES,
        message_s: 5e-4,
        handoff_s: 1e-3,
        prefix_index: true,
        warm_router: true,
        ..Config::default()
    };
    simulate(config, &mut requests.iter().cloned())
}

fn router_args() -> RouterArgs {
    RouterArgs {
        policy: crate::args::PolicyName::Cost,
        roles: crate::args::RolesName::Fixed,
        role_preference: 0.05,
        ttft_target_ms: None,
        tpot_target_ms: None,
        no_admission: false,
        no_prefix_index: false,
    }
}

fn fleet() -> Fleet {
    let worker = |(id, role): (u32, Role)| Worker {
        id,
        role: role.as_str().to_owned(),
        ready: true,
        machine: 1,
        class: 0,
        num_blocks: 8_000,
        block_size_tokens: 32,
        max_model_len_tokens: 16_384,
        reports_cache: true,
        model: 0,
    };
    Fleet {
        t: 0.0,
        workers: [4, 7].into_iter().zip(ROLES).map(worker).collect(),
        classes: vec![Class::new("Some GPU", 1, &RATES)],
    }
}

fn record(outcome: &Outcome) -> Record {
    let ms = |at: Time| 1e3 * at.s_since(outcome.due);
    Record {
        arrived_s: 3.0 + outcome.due.as_s(),
        prompt_tokens: outcome.prompt_tokens,
        output_tokens: outcome.output_tokens,
        cached_tokens: outcome.cached_tokens,
        workers: Some((
            [4, 7][outcome.prefill as usize],
            [4, 7][outcome.decode as usize],
        )),
        first_token_ms: outcome.first.map(ms),
        second_token_ms: outcome.second.map(ms),
        end_ms: ms(outcome.end),
        handoff: outcome.is_split().then(|| {
            let bytes = (BYTES * f64::from(outcome.prompt_tokens)) as u64;
            Handoff(bytes, 1e3 * outcome.transfer_s, 1e3 * outcome.exposed_s)
        }),
        ..Record::default()
    }
}

/// The log that a router would have kept of the run.
pub(super) fn write_log(folder: &Path, requests: &[Request], run: &Run) -> PathBuf {
    let path = folder.join("requests.log");
    let keep = Keep {
        path: path.clone(),
        bytes: 1 << 30,
        files: 1,
    };
    let router = Router {
        policy: "cost".to_owned(),
        strict_roles: true,
        role_preference: 0.05,
        admission: true,
        ttft_target_ms: None,
        tpot_target_ms: None,
    };
    let hooks = Hooks {
        fleet: Box::new(fleet),
        dropped: Box::new(|_, count| panic!("{count} requests were dropped")),
    };
    let log = RequestLog::start(keep, router, hooks).unwrap();
    let scheme = ChunkScheme::of_blocks(Identity::default(), 32);
    for outcome in &run.outcomes {
        log.write(Ended {
            record: record(outcome),
            chunks: Chunks::named(&[scheme], &requests[outcome.index].chunks),
        });
    }
    log.close(Duration::from_secs(20));
    path
}

pub(super) fn parse(words: &[&str]) -> (SimulateArgs, ArgMatches) {
    let words = std::iter::once("simulate").chain(words.iter().copied());
    let matches = SimulateArgs::command().try_get_matches_from(words).unwrap();
    (SimulateArgs::from_arg_matches(&matches).unwrap(), matches)
}

fn figure(figures: &[Figure], name: &str) -> f64 {
    figures.iter().find(|f| f.name == name).unwrap().value
}

#[test]
fn a_log_of_a_run_is_replayed_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let requests = requests();
    let run = served(&requests);
    let cached: u32 = run.outcomes.iter().map(|o| o.cached_tokens).sum();
    assert!(cached > 40 * 1_024, "the run has hits: {cached}");
    let path = write_log(folder.path(), &requests, &run);
    let log = Logged::read(&path).unwrap();
    let (args, _) = parse(&[path.to_str().unwrap()]);
    let hardware = Hardware::or(&args.hardware, log.source()).unwrap();
    let again = super::run(&log, &hardware, &real(&args, &log, &hardware), 1.0);
    let (measured, replayed) = (figures(&log.measured, None), figures(&again.outcomes, None));
    assert_eq!(
        figure(&measured, "cached_percent"),
        figure(&replayed, "cached_percent")
    );
    let trust = Trust::of(&measured, &replayed);
    assert!(trust.worst_percent < 3.0, "{measured:?}\n{replayed:?}");
    // Each request went where it went, and had as many tokens cached.
    let mut outcomes = again.outcomes;
    outcomes.sort_by_key(|outcome| outcome.index);
    for (real, again) in log.measured.iter().zip(&outcomes) {
        assert_eq!((real.prefill, real.decode), (again.prefill, again.decode));
        assert_eq!(real.cached_tokens, again.cached_tokens);
    }
}

#[test]
fn what_is_given_makes_a_second_run_and_nothing_makes_none() {
    let folder = tempfile::tempdir().unwrap();
    let requests = requests();
    let path = write_log(folder.path(), &requests, &served(&requests));
    let path = path.to_str().unwrap();
    let log = Logged::read(Path::new(path)).unwrap();
    let then = |words: &[&str]| {
        let (args, matches) = parse(&[&[path], words].concat());
        let hardware = Hardware::or(&args.hardware, log.source()).unwrap();
        what_if(&args, &matches, &log, &hardware).unwrap()
    };
    assert!(then(&[]).is_none());
    assert!(then(&["--max-batched-tokens", "512"]).is_none());
    let other = then(&["--prefill", "1", "--decode", "2"]).unwrap();
    assert_eq!(
        (other.workers.len(), other.topology.strict_roles),
        (3, true)
    );
    let other = then(&["--policy", "round-robin", "--speed", "2"]).unwrap();
    assert_eq!(other.workers.len(), 2);
    assert_eq!(other.router.policy, crate::args::PolicyName::RoundRobin);
    // Twice as fast, and with a worker away, the same requests see longer times.
    let (args, matches) = parse(&[path, "--speed", "3", "--fault", "slow:0@0=2"]);
    let hardware = Hardware::or(&args.hardware, log.source()).unwrap();
    let slower = what_if(&args, &matches, &log, &hardware).unwrap().unwrap();
    let as_it_was = super::run(&log, &hardware, &real(&args, &log, &hardware), 1.0);
    let slowed = super::run(&log, &hardware, &slower, args.replay.speed.unwrap());
    let ttft = |run: &Run| figure(&figures(&run.outcomes, None), "ttft_p50_ms");
    assert!(ttft(&slowed) > 2.0 * ttft(&as_it_was));
}

#[test]
fn a_log_and_a_workload_contradict_each_other() {
    let (_, matches) = parse(&["x.log", "--lengths", "100:10"]);
    let error = refuse_workload(&matches).unwrap_err().to_string();
    assert!(error.contains("--lengths"), "{error}");
    let (_, matches) = parse(&["x.log", "--request-rate", "4"]);
    assert!(refuse_workload(&matches).is_err());
    let (_, matches) = parse(&["x.log", "--mixed", "4"]);
    refuse_workload(&matches).unwrap();
}

#[test]
fn beyond_its_end_a_log_begins_again_with_other_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let requests = requests();
    let path = write_log(folder.path(), &requests, &served(&requests));
    let log = Logged::read(&path).unwrap();
    let sent: Vec<Request> = std::iter::from_fn({
        let mut clients = LogClients::new(&log, 480, 2.0);
        move || tasuki_sim::Clients::next(&mut clients)
    })
    .collect();
    assert_eq!(sent.len(), 480);
    assert!(sent.is_sorted_by_key(|request| request.due));
    assert_eq!(sent[0].chunks[..8], sent[3].chunks[..8]);
    assert_ne!(sent[0].chunks[8], sent[3].chunks[8]);
    assert_ne!(sent[0].chunks[0], sent[240].chunks[0]);
    assert_eq!(sent[240].chunks[..8], sent[243].chunks[..8]);
    let span_s = sent[240].due.as_s();
    assert!((span_s - 0.05 * 240.0 / 2.0).abs() < 0.1, "{span_s}");
}

#[test]
fn absences_of_workers_are_replayed() {
    let known = |t: f64, ready: bool| {
        let mut fleet = fleet();
        fleet.t = t;
        fleet.workers[1].ready = ready;
        fleet
    };
    let fleets = [
        known(0.0, false),
        known(1.0, true),
        known(5.0, false),
        known(9.0, true),
    ];
    let faults = logged::absences(&fleets, &fleet(), 2.0);
    let told: Vec<_> = faults
        .iter()
        .map(|f| (f.worker, f.at.as_s(), f.kind))
        .collect();
    let (drain, undrain) = (tasuki_sim::FaultKind::Drain, tasuki_sim::FaultKind::Undrain);
    assert_eq!(told, [(1, 3.0, drain), (1, 7.0, undrain)]);
}

#[test]
fn workers_that_replaced_others_are_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let requests = requests();
    let path = write_log(folder.path(), &requests, &served(&requests));
    // A rolling upgrade in the middle: 10 follows 4, then 11 follows 7.
    let mut lines: Vec<String> = std::fs::read_to_string(&path)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect();
    let of = |at_s: f64, ids: [u32; 2]| {
        let mut known = fleet();
        known.t = at_s;
        known.workers[0].id = ids[0];
        known.workers[1].id = ids[1];
        serde_json::json!({"fleet": known}).to_string()
    };
    lines.push(of(9.0, [10, 7]));
    lines.push(of(9.5, [10, 11]));
    std::fs::write(&path, lines.join("\n")).unwrap();
    let log = Logged::read(&path).unwrap();
    let topology = log.topology();
    assert_eq!((topology.prefill, topology.decode), (2, 2));
    assert!(
        log.notes
            .iter()
            .any(|note| note.contains("at most 2 were ready"))
    );
    let (args, _) = parse(&[path.to_str().unwrap()]);
    let hardware = Hardware::or(&args.hardware, log.source()).unwrap();
    let run = super::run(&log, &hardware, &real(&args, &log, &hardware), 1.0);
    // In the order of ids: 4 and 7 are 0 and 1. Requests come from 3 s of the log on.
    for outcome in &run.outcomes {
        let (at_s, prefill, decode) = (outcome.due.as_s(), outcome.prefill, outcome.decode);
        assert_eq!(prefill, if at_s < 6.0 { 0 } else { 2 }, "at {at_s}");
        assert!(at_s < 6.5 || decode == 3, "at {at_s}: {decode}");
    }
}

#[test]
fn the_longest_gap_is_an_objective_of_a_replay() {
    let folder = tempfile::tempdir().unwrap();
    let requests = &requests()[..20];
    let path = write_log(folder.path(), requests, &served(requests));
    let slo = "itl=8ms".parse().unwrap();
    let met = |outcomes: &[Outcome]| figure(&figures(outcomes, Some(&slo)), "met_percent");
    let (args, matches) = parse(&[path.to_str().unwrap(), "--slo", "itl=8ms"]);
    let error = replay(&args, &matches, &path).err().unwrap().to_string();
    assert!(
        error.contains("20 answers") && error.contains("leave out itl"),
        "{error}"
    );
    let mut text = std::fs::read_to_string(&path).unwrap();
    text = text.replace(r#","e":"#, r#","m":9.0,"e":"#);
    std::fs::write(&path, text).unwrap();
    let log = Logged::read(&path).unwrap();
    assert_eq!(met(&log.measured), 0.0);
    // Prompts of 1,200 tokens and more come between the tokens of other requests.
    let (replayed, _) = replay(&args, &matches, &path).unwrap();
    assert!(met(&replayed.run.outcomes) < 100.0);
}

#[test]
fn the_rate_of_a_log_is_that_of_its_gaps() {
    let folder = tempfile::tempdir().unwrap();
    let rate = |requests: &[Request]| {
        let path = write_log(folder.path(), requests, &served(requests));
        Logged::read(&path).unwrap().rate()
    };
    let requests = requests();
    // A request every 50 ms.
    for count in [2, 3, 10, 240] {
        let rate = rate(&requests[..count]).unwrap();
        assert!((rate - 20.0).abs() < 0.1, "{count}: {rate}");
    }
    assert_eq!(rate(&requests[..1]), None);
    let at_once: Vec<Request> = (0..4)
        .map(|index| Request {
            due: Time::ZERO,
            ..requests[index].clone()
        })
        .collect();
    assert_eq!(rate(&at_once), None);
}

#[test]
fn handoffs_that_moved_nothing_do_not_say_how_fast_kv_moves() {
    let folder = tempfile::tempdir().unwrap();
    let requests = &requests()[..20];
    let path = write_log(folder.path(), requests, &served(requests));
    let mut log = Logged::read(&path).unwrap();
    let before = log.source().link.unwrap();
    for request in &mut log.requests[..18] {
        request.record.handoff = Some(Handoff(0, 2.0, 2.0));
    }
    let bytes_per_s = log.source().link.unwrap().bytes_per_s;
    assert!(
        bytes_per_s > 0.5 * before.bytes_per_s,
        "{bytes_per_s}, {before:?}"
    );
    for request in &mut log.requests {
        request.record.handoff = Some(Handoff(0, 2.0, 2.0));
    }
    let source = log.source();
    assert_eq!((source.link, source.kv_bytes_per_token), (None, None));
}
