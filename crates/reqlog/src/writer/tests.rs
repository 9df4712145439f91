use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

use tasuki_core::{ChunkScheme, Identity, Rates};

use super::*;
use crate::format::{Class, Handoff, Worker};
use crate::reader::{Log, ReadError};

const LIMIT: Duration = Duration::from_secs(20);

fn keep(folder: &Path, bytes: u64, files: u32) -> Keep {
    Keep {
        path: folder.join("requests.log"),
        bytes,
        files,
    }
}

fn router() -> Router {
    Router {
        policy: "cost".to_owned(),
        strict_roles: false,
        role_preference: 0.05,
        admission: true,
        ttft_target_ms: Some(200.0),
        tpot_target_ms: None,
    }
}

fn fleet() -> Fleet {
    Fleet {
        t: 0.0,
        workers: vec![Worker {
            id: 0,
            role: "mixed".to_owned(),
            ready: true,
            machine: 1,
            class: 0,
            num_blocks: 100,
            block_size_tokens: 16,
            max_model_len_tokens: 512,
            reports_cache: true,
            model: 0,
        }],
        classes: vec![Class::new("cpu", 1, &Rates::default())],
    }
}

#[test]
fn rates_are_told_again_when_long_steps_or_prompts_take_another_time() {
    let of = |change: fn(&mut Class)| {
        let mut changed = fleet();
        changed.classes[0].step_ms = 5.0;
        changed.classes[0].prompt_token_us = 20.0;
        change(&mut changed.classes[0]);
        changed
    };
    let told = of(|class| (class.kv_token_ns, class.prompt_square_ns) = (45.0, 0.3));
    let same = of(|class| (class.kv_token_ns, class.prompt_square_ns) = (47.0, 0.32));
    assert!(is_told(&told, &same, CHANGED));
    for slower in [
        of(|class| (class.kv_token_ns, class.prompt_square_ns) = (90.0, 0.3)),
        of(|class| (class.kv_token_ns, class.prompt_square_ns) = (45.0, 0.9)),
    ] {
        assert!(!is_told(&told, &slower, CHANGED), "{slower:?}");
    }
    // A share of what is next to nothing is no change.
    let (none, little) = (
        of(|class| class.kv_token_ns = 0.001),
        of(|class| class.kv_token_ns = 0.01),
    );
    assert!(is_told(&none, &little, CHANGED));
}

fn hooks(dropped: &Arc<AtomicU64>) -> Hooks {
    let dropped = Arc::clone(dropped);
    Hooks {
        fleet: Box::new(fleet),
        dropped: Box::new(move |_, count| {
            dropped.fetch_add(count, Ordering::SeqCst);
        }),
    }
}

/// A request whose prompt begins like that of every other of its `group`, for 256 tokens.
fn ended(number: u32, group: u32) -> Ended {
    let scheme = ChunkScheme::of_blocks(Identity::default(), 16);
    let own = (0..200).map(|token| token + 1_000 * (number + 1));
    let prompt: Vec<u32> = (0..256).map(|token| token + 7 * group).chain(own).collect();
    Ended {
        record: Record {
            arrived_s: 0.25 * f64::from(number),
            prompt_tokens: prompt.len() as u32,
            output_tokens: 20,
            workers: Some((0, 1)),
            first_token_ms: Some(12.34),
            second_token_ms: Some(15.0),
            end_ms: 100.06,
            handoff: Some(Handoff(1_000_000, 2.25, 1.0)),
            ..Record::default()
        },
        chunks: Chunks::new(&[scheme], "", &prompt),
    }
}

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (dropped, keep) = (Arc::default(), keep(folder.path(), 1 << 20, 3));
    let log = RequestLog::start(keep.clone(), router(), hooks(&dropped)).unwrap();
    assert!(matches!(
        RequestLog::start(keep.clone(), router(), hooks(&dropped)),
        Err(OpenError::Locked { .. })
    ));
    // Ends in another order than they came.
    for number in [1, 0, 2, 3] {
        log.write(ended(number, number % 2));
    }
    log.close(LIMIT);
    let read = Log::read(&keep.path).unwrap();
    assert_eq!((read.skipped, dropped.load(Ordering::SeqCst)), (0, 0));
    assert_eq!(read.header.router, router());
    let known = read.fleet().unwrap();
    assert_eq!(
        (known.workers, known.classes),
        (fleet().workers, fleet().classes)
    );
    let times: Vec<f64> = read.requests.iter().map(|r| r.record.arrived_s).collect();
    assert_eq!(times, [0.0, 0.25, 0.5, 0.75]);
    let one = &read.requests[0].record;
    assert_eq!(one.first_token_ms, Some(12.3));
    assert_eq!(
        (one.end_ms, one.handoff),
        (100.1, Some(Handoff(1_000_000, 2.3, 1.0)))
    );
    let chunks: Vec<_> = read.requests.iter().map(|r| r.chunks.to_vec()).collect();
    assert_eq!(
        chunks.iter().map(Vec::len).collect::<Vec<_>>(),
        [2, 2, 2, 2]
    );
    assert!(chunks[0] == chunks[2] && chunks[1] == chunks[3] && chunks[0] != chunks[1]);
}

#[test]
fn files_are_rotated_and_each_stands_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (dropped, keep) = (Arc::default(), keep(folder.path(), 3_000, 3));
    let log = RequestLog::start(keep.clone(), router(), hooks(&dropped)).unwrap();
    for number in 0..100 {
        log.write(ended(number, 0));
    }
    log.close(LIMIT);
    let mut names: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["requests.log", "requests.log.1", "requests.log.2"]);
    let mut last = 100.0;
    for name in names {
        let path = folder.path().join(name);
        assert!(fs::metadata(&path).unwrap().len() <= 3_000);
        let read = Log::read(&path).unwrap();
        assert_eq!(read.skipped, 0);
        assert_eq!(read.fleet().unwrap().workers, fleet().workers);
        // One after the other, and all of a file begin alike.
        for request in read.requests.iter().rev() {
            assert_eq!(4.0 * request.record.arrived_s, last - 1.0);
            assert_eq!(request.chunks, read.requests[0].chunks);
            last -= 1.0;
        }
    }
}

#[test]
fn a_file_whose_first_lines_could_not_be_written_is_a_log_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let (dropped, keep) = (Arc::default(), keep(folder.path(), 1 << 20, 3));
    let header = Header {
        tasuki_request_log: VERSION,
        tasuki: String::new(),
        began_unix_s: 0.0,
        router: router(),
    };
    let (_sender, inbox) = sync_channel(1);
    let files = Files::open(keep.clone()).unwrap();
    let hooks = Arc::new(hooks(&dropped));
    let mut writer = Writer::new(files, inbox, hooks, header, Instant::now());
    let read_only = fs::File::open(&keep.path).unwrap();
    let good = writer.files.swap(read_only);
    for number in 0..2 {
        writer.put(ended(number, 0));
        writer.append();
    }
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
    writer.files.swap(good);
    writer.put(ended(2, 0));
    writer.append();
    let read = Log::read(&keep.path).unwrap();
    assert_eq!((read.requests.len(), read.skipped), (1, 0));
    assert_eq!(read.fleet().unwrap().workers, fleet().workers);
}

#[test]
fn an_earlier_routers_log_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (dropped, keep) = (Arc::default(), keep(folder.path(), 1 << 20, 2));
    for life in 0..2 {
        let log = RequestLog::start(keep.clone(), router(), hooks(&dropped)).unwrap();
        log.write(ended(life, 0));
        log.close(LIMIT);
    }
    assert_eq!(
        Log::read(&keep.path).unwrap().requests[0].record.arrived_s,
        0.25
    );
    let before = folder.path().join("requests.log.1");
    assert_eq!(
        Log::read(&before).unwrap().requests[0].record.arrived_s,
        0.0
    );
}

#[test]
fn where_no_new_file_can_be_opened_the_old_ones_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = Files::open(keep(folder.path(), 1 << 20, 2)).unwrap();
    files.append(b"one\n").unwrap();
    files.rotate().unwrap();
    files.append(b"two\n").unwrap();
    let in_the_way = folder.path().join("requests.log.new");
    fs::create_dir(&in_the_way).unwrap();
    for _ in 0..3 {
        assert!(files.rotate().is_err());
    }
    files.append(b"three\n").unwrap();
    let read = |name| fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(read("requests.log"), "two\nthree\n");
    assert_eq!(read("requests.log.1"), "one\n");
    fs::remove_dir(in_the_way).unwrap();
    files.rotate().unwrap();
    assert_eq!(
        (read("requests.log"), read("requests.log.1")),
        (String::new(), "two\nthree\n".to_owned())
    );
}

#[test]
fn a_worker_that_serves_before_the_fleet_is_looked_at_again_is_told_first() {
    let folder = tempfile::tempdir().unwrap();
    let (dropped, keep) = (Arc::default(), keep(folder.path(), 1 << 20, 1));
    let looks = AtomicU64::new(0);
    let come_later = move || match looks.fetch_add(1, Ordering::SeqCst) {
        0 => Fleet::default(),
        _ => fleet(),
    };
    let hooks = Hooks {
        fleet: Box::new(come_later),
        ..hooks(&dropped)
    };
    let log = RequestLog::start(keep.clone(), router(), hooks).unwrap();
    log.write(ended(0, 0));
    log.close(LIMIT);
    let text = fs::read_to_string(&keep.path).unwrap();
    let line = |words| text.lines().position(|line| line.contains(words)).unwrap();
    assert!(line("\"mixed\"") < line("\"w\":"), "{text}");
}

#[test]
fn a_torn_record_is_skipped_with_a_count() {
    let folder = tempfile::tempdir().unwrap();
    let (dropped, keep) = (Arc::default(), keep(folder.path(), 1 << 20, 1));
    let log = RequestLog::start(keep.clone(), router(), hooks(&dropped)).unwrap();
    for number in 0..3 {
        log.write(ended(number, 0));
    }
    log.close(LIMIT);
    let whole = fs::read(&keep.path).unwrap();
    fs::write(&keep.path, &whole[..whole.len() - 20]).unwrap();
    let read = Log::read(&keep.path).unwrap();
    assert_eq!((read.skipped, read.requests.len()), (1, 2));
}

#[test]
fn other_versions_and_other_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.log");
    let refused = |text: &str| {
        fs::write(&path, text).unwrap();
        Log::read(&path).unwrap_err()
    };
    let newer = refused("{\"tasuki_request_log\":99,\"x\":1}\n");
    assert!(newer.to_string().contains("version 99"), "{newer}");
    assert!(matches!(newer, ReadError::Version { found: 99, .. }));
    assert!(matches!(refused("{\"a\":1}\n"), ReadError::NoLog { .. }));
    assert!(matches!(refused(""), ReadError::NoLog { .. }));
}

#[test]
fn a_full_queue_drops_and_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (dropped, keep) = (Arc::default(), keep(folder.path(), 1 << 20, 1));
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let (held, entered) = (Arc::clone(&gate), Arc::new(AtomicU64::new(0)));
    let seen = Arc::clone(&entered);
    let hooks = Hooks {
        fleet: Box::new(move || {
            seen.fetch_add(1, Ordering::SeqCst);
            let (open, opened) = &*held;
            let open = open.lock().unwrap();
            let _open = opened
                .wait_timeout_while(open, LIMIT, |open| !*open)
                .unwrap();
            fleet()
        }),
        ..hooks(&dropped)
    };
    let log = RequestLog::start_with(4, keep.clone(), router(), hooks).unwrap();
    let until = Instant::now() + LIMIT;
    while entered.load(Ordering::SeqCst) == 0 {
        assert!(
            Instant::now() < until,
            "the thread does not look at the fleet"
        );
        thread::yield_now();
    }
    for number in 0..7 {
        log.write(ended(number, 0));
    }
    assert_eq!(dropped.load(Ordering::SeqCst), 3);
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    log.close(LIMIT);
    assert_eq!(Log::read(&keep.path).unwrap().requests.len(), 4);
}

#[test]
fn tenants_are_told_apart_and_not_named() {
    let folder = tempfile::tempdir().unwrap();
    let keep = keep(folder.path(), 1 << 20, 1);
    let log = RequestLog::start(keep, router(), hooks(&Arc::default())).unwrap();
    assert_eq!(log.tenant(""), 0);
    assert_eq!(log.tenant("a"), log.tenant("a"));
    assert_ne!(log.tenant("a"), log.tenant("b"));
}
