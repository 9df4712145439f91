//! Command lines that are read, and such that are refused.

use std::time::Duration;

use tasuki_policy::{PolicyKind, Rule};

use super::*;

fn parse(words: &str) -> Result<RouterArgs, clap::Error> {
    RouterArgs::parse_from_words(std::iter::once("tasuki router").chain(words.split(' ')))
}

#[test]
fn defaults_and_repeated_options() {
    let args = parse("--model /m/tiny --worker a:1 --worker b:2").unwrap();
    assert_eq!(args.worker, ["a:1", "b:2"]);
    assert_eq!((args.host.as_str(), args.port), ("127.0.0.1", 8000));
    assert_eq!(args.models().unwrap().models[0].names, ["tiny"]);
    assert_eq!(args.http().max_body_bytes, 8 * 1024 * 1024);
    assert_eq!(args.drain(), Duration::from_secs(30));
    let args = parse("--model m --worker a:1 --served-model-name x y --on-kv-loss fail");
    let args = args.unwrap();
    assert_eq!(args.models().unwrap().models[0].names, ["x", "y"]);
    assert_eq!(args.on_kv_loss, KvLoss::Fail);
    assert_eq!(args.serving(&[]).policy, PolicyKind::Cost);
    let args = parse("--model m --worker a:1 --policy power-of-two").unwrap();
    let power_of_two = PolicyKind::Simple(Rule::PowerOfTwo);
    assert_eq!(args.serving(&[]).policy, power_of_two);
    let parsers = |words| {
        let http = parse(words).unwrap().http();
        (http.tool_parser, http.reasoning_parser)
    };
    let default = (ToolParser::Auto, ReasoningParser::Auto);
    assert_eq!(parsers("--model m --worker a:1"), default);
    assert_eq!(
        parsers("--model m --worker a:1 --tool-parser llama3 --reasoning-parser none"),
        (ToolParser::Llama3, ReasoningParser::None)
    );
    let args = parse("--model a=/m/1 --model ./b=c --worker w:1 --alias d=a").unwrap();
    let folder =
        |name: Option<&str>, path: &str| NamedFolder(name.map(str::to_owned), PathBuf::from(path));
    assert_eq!(
        args.model,
        [folder(Some("a"), "/m/1"), folder(None, "./b=c")]
    );
    assert_eq!(args.models().unwrap().models[0].names, ["a", "d"]);
    let args = parse("--worker vllm://a:1 --worker sglang://b:2?role=prefill").unwrap();
    assert_eq!(args.worker, ["vllm://a:1", "sglang://b:2?role=prefill"]);
    let names = parse("--model m --discover file:w.txt --alias x=theirs").unwrap();
    let theirs = ("x".to_owned(), "theirs".to_owned());
    assert_eq!(names.models().unwrap().foreign, [theirs]);
    let args = parse("--model m --discover file:w.txt dns:a:1").unwrap();
    let sources = args.serving(&[]).workers;
    assert_eq!(
        (sources.list.len(), sources.discover),
        (
            0,
            vec![
                Source::File(PathBuf::from("w.txt")),
                Source::Dns("a:1".to_owned())
            ]
        )
    );
}

#[test]
fn a_log_filter_silences_nothing_by_mistake() {
    let log = |filter: &str| parse(&format!("--model m --worker a:1 --log={filter}"));
    assert_eq!(log("").unwrap().log, "info");
    for filter in [
        "warn",
        "INFO",
        "info,h2=warn",
        "tasuki_router=debug",
        "access=off,info,",
    ] {
        assert_eq!(log(filter).unwrap().log, filter);
    }
    let refused = log("warning").unwrap_err().to_string();
    assert!(
        refused.contains("\"warning\" is no level: use off, error, warn"),
        "{refused}"
    );
    assert!(log("info,verbose").is_err());
}

#[test]
fn bad_values_are_refused() {
    for words in [
        "--model m",
        "--model m --worker a",
        "--model m --worker a:0",
        "--worker a:1",
        "--worker http://a:1",
        "--worker vllm://a:1?role=both",
        "--model =m --worker a:1",
        "--model m --worker a:1 --alias x",
        "--model m --discover dns:workers",
        "--model m --discover workers.txt",
        "--model m --discover dns:workers:1 --dns-interval-s 0",
        "--model m --worker a:1 --drain-s -1",
        "--model m --worker a:1 --drain-s nan",
        "--model m --worker a:1 --max-concurrent-requests 0",
        "--model m --worker a:1 --idle-timeout-s 0",
        "--model m --worker a:1 --max-answer-bytes 1000",
        "--model m --worker a:1 --ttft-target-ms 0",
        "--model m --worker a:1 --no-admission --tpot-target-ms 9",
        "--model m --worker a:1 --tenant-header a:b",
        "--model m --worker a:1 --policy random",
        "--model m --worker a:1 --tool-parser xml",
    ] {
        assert!(parse(words).is_err(), "{words}");
    }
}
