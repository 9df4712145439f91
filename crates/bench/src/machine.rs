//! Where a run was made: the machine, the revision of the folder it ran in.

use std::fs;
use std::process::{Command, Stdio};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// The machine of the client, which is the server's too in most first runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    pub cpu: Option<String>,
    pub cores: usize,
    pub memory_bytes: Option<u64>,
    pub gpus: Vec<String>,
    pub os: String,
}

impl Machine {
    /// This machine. Runs `nvidia-smi` if it is there.
    pub fn this() -> Self {
        let system = rustix::system::uname();
        let word = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        Self {
            cpu: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            memory_bytes: field("/proc/meminfo", "MemTotal").and_then(|total| {
                let kib: u64 = total.strip_suffix(" kB")?.parse().ok()?;
                Some(kib * 1024)
            }),
            gpus: said("nvidia-smi", &["--query-gpu=name", "--format=csv,noheader"])
                .map_or(Vec::new(), |names| {
                    names.lines().map(str::to_owned).collect()
                }),
            os: format!("{} {}", word(system.sysname()), word(system.release())),
        }
    }
}

/// CPU time of this process.
pub fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Lets this process open as many files as the system allows: each request in flight takes one.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let _ = setrlimit(Resource::Nofile, raised);
}

/// The commit that is checked out in the current folder, if it is a repository.
pub fn git_revision() -> Option<String> {
    said("git", &["rev-parse", "HEAD"])
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let output = command
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_cores_and_a_system() {
        let machine = Machine::this();
        assert!(machine.cores > 0 && !machine.os.trim().is_empty());
        assert_eq!(said("no-such-program-anywhere", &[]), None);
    }
}
