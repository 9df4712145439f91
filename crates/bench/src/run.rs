//! The commands: parse, do, and say in an exit code how it went.

use clap::Parser;
use clap::error::ErrorKind;

use crate::console::warn;
use crate::fake::serve_until_told;
use crate::machine::raise_open_files;
use crate::options::{BenchCli, BenchCommand};
use crate::serve;

/// Exit codes, as clap has them.
const FAILED: i32 = 1;
const USAGE: i32 = 2;

/// Runs a command of `tasuki bench` with these arguments, the command's name
/// first among them. Returns the exit code: 1 if the run could not be made or
/// no request was answered, 130 if it was stopped.
pub fn run(arguments: Vec<String>) -> i32 {
    let words: Vec<String> = ["tasuki", "bench"].map(str::to_owned).to_vec();
    let words = [words, arguments].concat();
    let cli = match BenchCli::try_parse_from(
        std::iter::once("tasuki bench".to_owned()).chain(words[2..].iter().cloned()),
    ) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() || error.kind() == ErrorKind::MissingSubcommand {
                USAGE
            } else {
                0
            };
        }
    };
    raise_open_files();
    let (name, code) = match cli.command {
        BenchCommand::FakeServer(args) => {
            let served = serve_until_told(args);
            ("fake-server", served.map(|()| 0).map_err(|e| e.to_string()))
        }
        BenchCommand::Serve(args) => {
            let served = serve::serve(&args, &without_secrets(&words)).map(|ended| match ended {
                serve::Ended::Measured => 0,
                serve::Ended::NothingAnswered => FAILED,
                serve::Ended::Interrupted => serve::INTERRUPTED,
            });
            ("serve", served.map_err(|error| error.to_string()))
        }
    };
    code.unwrap_or_else(|error| {
        warn(&format!("tasuki bench {name}: {error}"));
        FAILED
    })
}

/// A command line fit for a result file.
fn without_secrets(words: &[String]) -> Vec<String> {
    const SECRET: [&str; 2] = ["--api-key", "--header"];
    let mut hide_next = false;
    let word = |word: &String| {
        if std::mem::replace(&mut hide_next, SECRET.contains(&word.as_str())) {
            return "***".to_owned();
        }
        match word.split_once('=') {
            Some((option, _)) if SECRET.contains(&option) => format!("{option}=***"),
            _ => word.clone(),
        }
    };
    words.iter().map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_not_get_into_result_files() {
        let words = [
            "serve",
            "--api-key",
            "sk-1",
            "--seed",
            "1",
            "--header=a:b",
            "--header",
            "c:d",
        ];
        let words = words.map(str::to_owned);
        assert_eq!(
            without_secrets(&words).join(" "),
            "serve --api-key *** --seed 1 --header=*** --header ***"
        );
    }

    #[test]
    fn a_command_may_open_as_many_files_as_the_system_allows() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

        let files = getrlimit(Resource::Nofile);
        let most = files.maximum.unwrap_or(1 << 20);
        let lowered = Rlimit {
            current: Some(most - 1),
            maximum: files.maximum,
        };
        setrlimit(Resource::Nofile, lowered).unwrap();
        assert_eq!(run(vec!["serve".to_owned(), "--dry-run".to_owned()]), 0);
        assert_eq!(getrlimit(Resource::Nofile).current, files.maximum);
    }

    #[test]
    fn usage_errors_and_help_have_their_exit_codes() {
        let run = |words: &[&str]| run(words.iter().map(|word| (*word).to_owned()).collect());
        assert_eq!(run(&["serve", "--no-such-option"]), USAGE);
        assert_eq!(run(&[]), USAGE);
        assert_eq!(run(&["serve", "--help"]), 0);
        assert_eq!(
            run(&["serve", "--base-url", "nowhere", "--no-output"]),
            FAILED
        );
        let dry = |option| {
            run(&[
                "serve",
                "--dry-run",
                "--base-url",
                "http://127.0.0.1:1",
                option,
            ])
        };
        assert_eq!(dry("--request-rate=2"), 0, "it needs no server");
        assert_eq!(dry("--request-rates=2"), USAGE);
        assert_eq!(dry("--prompt-as=tokens"), FAILED);
    }
}
