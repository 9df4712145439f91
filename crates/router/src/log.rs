//! The process' log: lines on stderr, those of the access log among them.

use tracing::Dispatch;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::access_log::{JsonLines, TARGET};
use crate::config::AccessLog;

/// Begins to log.
///
/// # Errors
/// A bad filter.
pub fn start(filter: &str, access: AccessLog) -> Result<(), ParseError> {
    // An embedding process may have a subscriber of its own already.
    let _ = lines(filter, access, std::io::stderr)?.try_init();
    Ok(())
}

/// What writes the log's lines to `writer`.
///
/// # Errors
/// A bad filter.
pub fn lines<W>(filter: &str, access: AccessLog, writer: W) -> Result<Dispatch, ParseError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let mut directives = EnvFilter::try_new(filter)?;
    if access == AccessLog::Off {
        directives = directives.add_directive(format!("{TARGET}=off").parse()?);
    }
    let lines = tracing_subscriber::fmt()
        .with_env_filter(directives)
        .with_writer(writer)
        .log_internal_errors(false) // by a panic where nobody reads stderr either
        .with_ansi(false);
    Ok(match access {
        AccessLog::Json => lines.event_format(JsonLines::default()).finish().into(),
        AccessLog::Text | AccessLog::Off => lines.finish().into(),
    })
}
