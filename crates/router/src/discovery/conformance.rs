//! What every source of addresses does, whatever it reads.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};

use super::tests::set;
use super::{AddressSet, Discovery, Dns, WatchedFile, union};
use crate::access_log::tests::Lines;
use crate::config::AccessLog;
use crate::workers::testing::{soon, until};

const POLL: Duration = Duration::from_millis(1);
const A: &str = "10.0.0.1:7001";
const B: &str = "10.0.0.2:7001";
const C: &str = "10.0.0.3:7001";

/// One kind of source, and what it reads.
trait Rig {
    /// From now on the source has these, in order, and no fault.
    fn publish(&mut self, addresses: &[&str]);
    /// From now on it cannot be read.
    fn fail(&mut self);
    fn source(&mut self) -> Box<dyn Discovery>;
}

async fn next(sets: &mut (impl Stream<Item = AddressSet> + Unpin)) -> AddressSet {
    soon("a set", sets.next()).await.expect("it never ends")
}

async fn conforms(mut rig: impl Rig) {
    let (lines, _guard) = Lines::keep("warn", AccessLog::Off);
    rig.publish(&[A]);
    let mut sets = union(vec![rig.source()]);
    assert_eq!(next(&mut sets).await, set(&[A]));
    let steps: [(&[&str], &[&str], &str); 3] = [
        (&[A, B], &[A, B], "added"),
        (&[B], &[B], "removed"),
        (&[B, B, C], &[B, C], "a duplicate"),
    ];
    for (published, expected, what) in steps {
        rig.publish(published);
        assert_eq!(next(&mut sets).await, set(expected), "{what}");
    }

    assert_eq!(lines.text(), "");
    rig.fail();
    tokio::select! {
        set = sets.next() => panic!("a failure is no set: {set:?}"),
        () = until("the warning", || lines.text().contains("addresses stay")) => {}
    }
    assert!(!lines.text().contains("kept=0"), "{}", lines.text());
    rig.publish(&[A, C]);
    assert_eq!(
        next(&mut sets).await,
        set(&[A, C]),
        "what came after the failure"
    );

    let flaps: [&[&str]; 4] = [&[C], &[A, C], &[], &[A, B, C]];
    for flap in flaps {
        rig.publish(flap);
    }
    let mut before = set(&[A, C]);
    while before != set(&[A, B, C]) {
        let seen = next(&mut sets).await;
        assert!(
            flaps.iter().any(|flap| seen == set(flap)),
            "{seen:?} never was"
        );
        assert_ne!(seen, before, "told twice");
        before = seen;
    }
}

struct File(tempfile::TempDir);

impl File {
    fn path(&self) -> PathBuf {
        self.0.path().join("workers")
    }
}

impl Rig for File {
    fn publish(&mut self, addresses: &[&str]) {
        let new = self.0.path().join("new");
        fs::write(&new, addresses.join("\n")).expect("written");
        fs::rename(new, self.path()).expect("replaced");
    }

    fn fail(&mut self) {
        fs::remove_file(self.path()).expect("removed");
    }

    fn source(&mut self) -> Box<dyn Discovery> {
        Box::new(WatchedFile::polled(self.path(), POLL, POLL))
    }
}

#[tokio::test]
async fn a_file() {
    conforms(File(tempfile::tempdir().expect("a folder"))).await;
}

type Answer = Option<Vec<SocketAddr>>;

/// Answers that were not given yet; the last one is given again and again.
#[derive(Default)]
struct Names(Arc<Mutex<VecDeque<Answer>>>);

impl Names {
    fn answer(&self, answer: Answer) {
        self.0.lock().expect("a lock").push_back(answer);
    }
}

impl Rig for Names {
    fn publish(&mut self, addresses: &[&str]) {
        // A name without addresses is a failure, not a set.
        if !addresses.is_empty() {
            let parsed = addresses.iter().map(|each| each.parse().expect("IP:PORT"));
            self.answer(Some(parsed.collect()));
        }
    }

    fn fail(&mut self) {
        self.answer(None);
    }

    fn source(&mut self) -> Box<dyn Discovery> {
        let answers = Arc::clone(&self.0);
        let resolve = move |_| {
            let mut answers = answers.lock().expect("a lock");
            let answer = match answers.len() {
                1 => answers.front().cloned().flatten(),
                _ => answers.pop_front().flatten(),
            };
            async { answer.ok_or_else(|| io::Error::other("no such name")) }.boxed()
        };
        let name = "workers:7001".to_owned();
        Box::new(Dns::resolved_by(name, POLL, Box::new(resolve)))
    }
}

#[tokio::test]
async fn a_name() {
    conforms(Names::default()).await;
}

#[cfg(feature = "kubernetes")]
mod kubernetes {
    use axum::http::StatusCode;

    use super::super::kubernetes::testing::{ApiServer, endpoint, slice};
    use super::*;

    impl Rig for ApiServer {
        fn publish(&mut self, addresses: &[&str]) {
            let hosts = addresses
                .iter()
                .map(|each| &each[..each.len() - ":7001".len()]);
            let mut hosts: Vec<&str> = hosts.collect();
            let listed = hosts.len();
            hosts.dedup();
            let one = |name, hosts: &[&str]| {
                let endpoints: Vec<_> = hosts.iter().map(|host| endpoint(host)).collect();
                slice(name, "IPv4", &[("grpc", 7001)], &endpoints)
            };
            self.apply(one("a", &hosts));
            // An endpoint that moves from one slice to another is in both for a while.
            let moving = if hosts.len() < listed {
                &hosts[..1]
            } else {
                &[]
            };
            self.apply(one("b", moving));
            self.set_fault(None);
        }

        fn fail(&mut self) {
            self.set_fault(Some(StatusCode::INTERNAL_SERVER_ERROR));
        }

        fn source(&mut self) -> Box<dyn Discovery> {
            Box::new(ApiServer::source(self, Duration::from_secs(3_600)))
        }
    }

    #[tokio::test]
    async fn a_service() {
        conforms(ApiServer::start().await).await;
    }
}
