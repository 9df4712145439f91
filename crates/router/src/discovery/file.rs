//! A file with one address a line, read again and again.

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tokio::time::sleep;

use super::{AddressSet, Discovery, NotAnAddress, address};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// While there is no address: a launcher writes the first ones when they can be served.
const FIRST_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A file that is being written is not taken before it stays the same for so long.
const UNCHANGED_FOR: Duration = Duration::from_millis(100);
/// Some 50,000 addresses.
const MAX_BYTES: u64 = 1 << 20;

/// Why a file's content is not taken.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("{path} cannot be read: {source}; make it a file that the router may read")]
    Read {
        path: String,
        source: std::io::Error,
    },
    #[error("{path} has more than {MAX_BYTES} bytes, the limit: list fewer workers")]
    TooLarge { path: String },
    #[error("{path}, line {line}: {given:?}: {source}; one address a line, # begins a comment")]
    Line {
        path: String,
        line: usize,
        given: String,
        source: NotAnAddress,
    },
}

/// A file with one address a line. `#` begins a comment; empty lines do not count. It may be
/// replaced or rewritten at any time.
pub struct WatchedFile {
    path: PathBuf,
    every: Duration,
    was_read: bool,
    unchanged_for: Duration,
    /// The text that was taken last, and its addresses.
    taken: Option<(String, AddressSet)>,
    logged: String,
}

impl WatchedFile {
    pub fn new(path: PathBuf) -> Self {
        Self::polled(path, POLL_INTERVAL, UNCHANGED_FOR)
    }

    pub(super) fn polled(path: PathBuf, every: Duration, unchanged_for: Duration) -> Self {
        Self {
            path,
            every,
            was_read: false,
            unchanged_for,
            taken: None,
            logged: String::new(),
        }
    }

    async fn next(&mut self) -> AddressSet {
        loop {
            if self.was_read {
                sleep(self.pause()).await;
            }
            self.was_read = true;
            match self.poll().await {
                Ok(changed) => {
                    self.logged.clear();
                    if let Some(set) = changed {
                        return set;
                    }
                }
                Err(error) => self.log(&error),
            }
        }
    }

    fn pause(&self) -> Duration {
        let has_some = |(_, addresses): &(String, AddressSet)| !addresses.is_empty();
        if self.taken.as_ref().is_some_and(has_some) {
            self.every
        } else {
            self.every.min(FIRST_POLL_INTERVAL)
        }
    }

    /// The addresses, if they are others than before.
    async fn poll(&mut self) -> Result<Option<AddressSet>, FileError> {
        let text = self.read().await?;
        let before = self.taken.as_ref();
        if before.is_some_and(|(taken, _)| *taken == text) {
            return Ok(None);
        }
        sleep(self.unchanged_for).await;
        if self.read().await? != text {
            return Ok(None);
        }
        let set = self.parse(&text)?;
        let changed = before.is_none_or(|(_, addresses)| *addresses != set);
        self.taken = Some((text, set.clone()));
        Ok(changed.then_some(set))
    }

    async fn read(&self) -> Result<String, FileError> {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            let file = std::fs::File::open(path)?;
            file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
            Ok(text)
        });
        let text = read.await.unwrap_or_else(|error| Err(error.into()));
        let path = || self.path.display().to_string();
        let text = text.map_err(|source| FileError::Read {
            path: path(),
            source,
        })?;
        if text.len() as u64 > MAX_BYTES {
            return Err(FileError::TooLarge { path: path() });
        }
        Ok(text)
    }

    fn parse(&self, text: &str) -> Result<AddressSet, FileError> {
        let lines = text.lines().enumerate();
        let lines = lines.map(|(at, line)| (at, line.split('#').next().unwrap_or("").trim()));
        let given = lines.filter(|(_, given)| !given.is_empty());
        let checked = given.map(|(at, given)| {
            address(given).map_err(|source| FileError::Line {
                path: self.path.display().to_string(),
                line: at + 1,
                given: given.chars().take(100).collect(),
                source,
            })
        });
        checked.collect()
    }

    /// Each fault once.
    fn log(&mut self, error: &FileError) {
        let error = error.to_string();
        if self.logged != error {
            let kept = self.taken.as_ref().map_or(0, |(_, set)| set.len());
            tracing::warn!(
                kept,
                "--discover file: {error}; the last good addresses stay"
            );
            self.logged = error;
        }
    }
}

impl Discovery for WatchedFile {
    fn watch(self: Box<Self>) -> BoxStream<'static, AddressSet> {
        let changes = stream::unfold(self, |mut file| async move {
            let set = file.next().await;
            Some((set, file))
        });
        changes.boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::time::timeout;

    use super::super::tests::set;
    use super::*;
    use crate::workers::testing::soon;

    const POLL: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn changes_are_taken_and_faults_keep_the_last_set() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workers");
        let mut file = WatchedFile::polled(path.clone(), POLL, POLL);
        assert!(matches!(file.poll().await, Err(FileError::Read { .. })));
        fs::write(&path, "# none yet\n").expect("written");
        assert_eq!(soon("the first set", file.next()).await, set(&[]));
        fs::write(&path, "a:1\n\n  b:2 # the second\n").expect("written");
        assert_eq!(soon("two", file.next()).await, set(&["a:1", "b:2"]));
        fs::write(&path, "a:1 # moved\nb:2\n").expect("written");
        assert!(matches!(file.poll().await, Ok(None)), "the same set");
        for (bad, says) in [
            ("a:1\nb\n", "workers, line 2: \"b\": it must be HOST:PORT"),
            (&"#".repeat(MAX_BYTES as usize + 1), "the limit"),
        ] {
            fs::write(&path, bad).expect("written");
            let error = file.poll().await.expect_err("refused").to_string();
            assert!(error.contains(says), "{error}");
        }
        fs::remove_file(&path).expect("removed");
        let error = file.poll().await.expect_err("gone").to_string();
        assert!(error.contains("cannot be read"), "{error}");
        let new = folder.path().join("new");
        fs::write(&new, "c:3").expect("written");
        fs::rename(&new, &path).expect("replaced");
        assert_eq!(soon("the new one", file.next()).await, set(&["c:3"]));
    }

    #[tokio::test]
    async fn the_first_addresses_are_soon_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workers");
        fs::write(&path, "").expect("written");
        let mut file = WatchedFile::polled(path.clone(), Duration::from_secs(3600), POLL);
        assert_eq!(soon("an empty set", file.next()).await, set(&[]));
        fs::write(&path, "a:1").expect("written");
        assert_eq!(soon("the first address", file.next()).await, set(&["a:1"]));
        fs::write(&path, "b:2").expect("written");
        let again = timeout(3 * FIRST_POLL_INTERVAL, file.next()).await;
        assert!(
            again.is_err(),
            "the next change may take the whole interval"
        );
    }
}
