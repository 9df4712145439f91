//! The log's files: PATH is written, PATH.1 is the one before it, and so on.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the log is, and how much of it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keep {
    pub path: PathBuf,
    /// Of one file.
    pub bytes: u64,
    /// Files kept, the one that is written among them; at least 1.
    pub files: u32,
}

/// Why no log can be kept.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("--request-log {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error(
        "--request-log {path}: another router writes this log; give each router a path of its own"
    )]
    Locked { path: PathBuf },
}

/// The file that is written. Its lock tells other routers so, and ends with the process.
pub struct Files {
    keep: Keep,
    file: File,
    /// Of whole lines in it.
    bytes: u64,
}

impl Files {
    /// Opens the log. What an earlier router wrote moves on to PATH.1.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(keep: Keep) -> Result<Self, OpenError> {
        let fail = |source| OpenError::File {
            path: keep.path.clone(),
            source,
        };
        let file = options().open(&keep.path).map_err(fail)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OpenError::Locked { path: keep.path }),
            Err(TryLockError::Error(error)) => return Err(fail(error)),
        }
        let used = file.metadata().map_err(fail)?.len() > 0;
        let path = keep.path.clone();
        let mut files = Self {
            keep,
            file,
            bytes: 0,
        };
        if used {
            files
                .rotate()
                .map_err(|source| OpenError::File { path, source })?;
        }
        Ok(files)
    }

    /// Whether so many bytes more would make the file larger than it may be.
    pub fn is_full(&self, more: usize) -> bool {
        self.bytes + more as u64 > self.keep.bytes
    }

    /// Whether nothing is in the file yet.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Writes to another file in its place; gives back the one before.
    #[cfg(test)]
    pub fn swap(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// Begins a new file. If it cannot be opened, all others stay as they are.
    pub fn rotate(&mut self) -> io::Result<()> {
        let new = suffixed(&self.keep.path, "new");
        let file = options().open(&new)?;
        file.set_len(0)?;
        for number in (0..self.keep.files).rev() {
            let from = numbered(&self.keep.path, number);
            if number + 1 == self.keep.files {
                remove(&from)?;
            } else if from.exists() {
                std::fs::rename(&from, numbered(&self.keep.path, number + 1))?;
            }
        }
        std::fs::rename(&new, &self.keep.path)?;
        // Nobody else knows of the new file yet.
        let _ = file.try_lock();
        self.file = file;
        self.bytes = 0;
        Ok(())
    }

    /// Appends whole lines: all of them, or none if there is an error.
    pub fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        match self.file.write_all(lines) {
            Ok(()) => {
                self.bytes += lines.len() as u64;
                Ok(())
            }
            Err(error) => {
                let _ = self.file.set_len(self.bytes);
                Err(error)
            }
        }
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    options
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    suffixed(path, &number.to_string())
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{suffix}"));
    name.into()
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
