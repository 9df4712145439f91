//! All addresses of a name, resolved again and again.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use tokio::net::lookup_host;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::{AddressSet, Discovery};

type Resolve = dyn Fn(String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send;

/// Every A and AAAA record of a name, with one port; of a URL with its scheme and parameters.
pub struct Dns {
    /// HOST:PORT.
    name: String,
    /// What addresses have before and behind that.
    around: [String; 2],
    ticks: Interval,
    resolve: Box<Resolve>,
    last: Option<AddressSet>,
    logged: String,
}

impl Dns {
    pub fn new(name: String, every: Duration) -> Self {
        let resolve = |name: String| async { Ok(lookup_host(name).await?.collect()) }.boxed();
        Self::resolved_by(name, every, Box::new(resolve))
    }

    pub(super) fn resolved_by(name: String, every: Duration, resolve: Box<Resolve>) -> Self {
        let (scheme, rest) = match name.find("://") {
            Some(at) => name.split_at(at + 3),
            None => ("", name.as_str()),
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (host_port, parameters) = rest.split_at(end);
        let around = [scheme, parameters].map(str::to_owned);
        let name = host_port.to_owned();
        let mut ticks = interval(every.max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            name,
            around,
            ticks,
            resolve,
            last: None,
            logged: String::new(),
        }
    }

    async fn next(&mut self) -> AddressSet {
        loop {
            self.ticks.tick().await;
            let found = (self.resolve)(self.name.clone()).await;
            match found.map(|found| in_order(found, &self.around)) {
                Ok(set) if set.is_empty() => self.log("it has no address"),
                Err(error) => self.log(&error.to_string()),
                Ok(set) => {
                    self.logged.clear();
                    if self.last.as_ref() != Some(&set) {
                        self.last = Some(set.clone());
                        return set;
                    }
                }
            }
        }
    }

    /// Each fault once.
    fn log(&mut self, error: &str) {
        if self.logged != error {
            let (name, kept) = (&self.name, self.last.as_ref().map_or(0, Vec::len));
            tracing::warn!(
                kept,
                "--discover dns:{name}: {error}; the last addresses stay. If workers exist, check \
                 the name's A and AAAA records"
            );
            self.logged = error.to_owned();
        }
    }
}

/// Resolvers give them in any order, and some twice.
fn in_order(mut found: Vec<SocketAddr>, [before, behind]: &[String; 2]) -> AddressSet {
    found.sort_unstable();
    found.dedup();
    let addresses = found
        .iter()
        .map(|address| format!("{before}{address}{behind}"));
    addresses.collect()
}

impl Discovery for Dns {
    fn watch(self: Box<Self>) -> BoxStream<'static, AddressSet> {
        let changes = stream::unfold(self, |mut dns| async move {
            let set = dns.next().await;
            Some((set, dns))
        });
        changes.boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use super::super::tests::set;
    use super::*;
    use crate::workers::testing::soon;

    const EVERY: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn changes_are_taken_and_failures_keep_the_last_set() {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let answers = Mutex::new(VecDeque::from([
            Err(io::Error::other("no such name")),
            Ok(vec![address("10.0.0.2:9"), address("[fd00::1]:9")]),
            Ok(vec![address("[fd00::1]:9"), address("10.0.0.2:9")]),
            Ok(vec![]),
            Err(io::Error::other("a time-out")),
            Ok(vec![address("10.0.0.3:9")]),
        ]));
        let resolve = move |name: String| {
            assert_eq!(name, "workers:9");
            let mut answers = answers.lock().expect("one thread");
            let answer = answers.pop_front().expect("no further question");
            async { answer }.boxed()
        };
        let dns = Dns::resolved_by("workers:9".to_owned(), EVERY, Box::new(resolve));
        let mut sets = Box::new(dns).watch();
        let first = soon("the first set", sets.next()).await;
        assert_eq!(first, Some(set(&["10.0.0.2:9", "[fd00::1]:9"])));
        let second = soon("the second set", sets.next()).await;
        assert_eq!(second, Some(set(&["10.0.0.3:9"])));
    }

    #[tokio::test]
    async fn addresses_of_other_engines_keep_scheme_and_parameters() {
        let name = "sglang://localhost:9?role=prefill".to_owned();
        let mut sets = Box::new(Dns::new(name, EVERY)).watch();
        let found = soon("an answer", sets.next()).await.expect("a set");
        let whole = |a: &String| a.starts_with("sglang://") && a.ends_with(":9?role=prefill");
        assert!(!found.is_empty() && found.iter().all(whole), "{found:?}");
    }

    #[tokio::test]
    async fn this_machine_has_a_name() {
        let mut sets = Box::new(Dns::new("localhost:9".to_owned(), EVERY)).watch();
        let found = soon("an answer", sets.next()).await.expect("a set");
        let local = |each: &String| ["127.0.0.1:9", "[::1]:9"].contains(&each.as_str());
        assert!(!found.is_empty() && found.iter().all(local), "{found:?}");
    }
}
