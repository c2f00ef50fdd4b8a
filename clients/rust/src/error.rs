//! Errors: one type, told apart by its kind, with what the server said in its rich status.

use std::collections::HashMap;
use std::error::Error as _;
use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{FieldViolation, StatusExt};

/// What a caller would do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The prompt leaves no room in the context.
    PromptTooLong,
    /// A field is wrong; `violations` names each. A target, a time or a name that cannot be one, too.
    InvalidRequest,
    /// The point to resume from is no longer held.
    OutOfRange,
    /// No model, adapter or generation of this name.
    NotFound,
    /// The request id is in use by a live generation.
    AlreadyExists,
    /// An adapter, a checkpoint or a model file does not fit.
    FailedPrecondition,
    /// A bounded resource is full; see `retry_after`.
    Overloaded,
    /// Not reachable, loading, draining: try again later.
    Unavailable,
    /// A known option or RPC that this server or model cannot honour.
    Unsupported,
    /// No credentials, wrong ones, or not enough rights.
    Authentication,
    /// The call's deadline passed; what had arrived stays in the stream.
    DeadlineExceeded,
    /// The generation was ended by somebody else, or with its client.
    Cancelled,
    /// Stored data is damaged.
    DataLoss,
    /// The stream ended without its last event.
    StreamCut,
    /// The server's fault; `metadata` holds a correlation id.
    Server,
}

/// A failed call. Its fields are those of [`Failure`].
#[derive(Clone, Debug)]
pub struct Error(Box<Failure>);

/// What is known of a failed call.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// What a caller would do about it.
    pub kind: ErrorKind,
    /// Status code of the call.
    pub code: Code,
    /// Name of the schema's `ErrorReason`, or where no server spoke one of the client's own: DEADLINE, UNREACHABLE,
    /// UNRESOLVABLE_TARGET, CONNECTION_LOST, INVALID_SETTING, STREAM_CUT, CLIENT_CLOSED, RUNTIME_ENDED.
    pub reason: String,
    /// What happened, for people.
    pub message: String,
    /// The values that the message speaks of, by name.
    pub metadata: HashMap<String, String>,
    /// The bad fields of the request: the path of each in the schema, and what is wrong with it.
    pub violations: Vec<FieldViolation>,
    /// How long the server asks to wait before another try.
    pub retry_after: Option<Duration>,
    /// What the trailer `grpc-retry-pushback-ms` says; below 0: never.
    pushback_ms: Option<i64>,
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl Deref for Error {
    type Target = Failure;

    fn deref(&self) -> &Failure {
        &self.0
    }
}

impl Error {
    pub(crate) fn local(kind: ErrorKind, code: Code, reason: &str, message: String) -> Self {
        Self(Box::new(Failure {
            kind,
            code,
            reason: reason.to_owned(),
            message,
            metadata: HashMap::new(),
            violations: Vec::new(),
            retry_after: None,
            pushback_ms: None,
        }))
    }

    pub(crate) fn invalid_setting(message: String) -> Self {
        Self::local(ErrorKind::InvalidRequest, Code::InvalidArgument, "INVALID_SETTING", message)
    }

    pub(crate) fn stream_cut() -> Self {
        let message = "the stream ended without its last event".to_owned();
        Self::local(ErrorKind::StreamCut, Code::DataLoss, "STREAM_CUT", message)
    }

    pub(crate) fn client_closed() -> Self {
        Self::local(ErrorKind::Cancelled, Code::Cancelled, "CLIENT_CLOSED", "the client was closed".to_owned())
    }

    /// The task that reads a stream ends with its runtime, perhaps before the stream.
    pub(crate) fn runtime_ended() -> Self {
        let message = "the runtime in which the stream was begun has ended".to_owned();
        Self::local(ErrorKind::Cancelled, Code::Cancelled, "RUNTIME_ENDED", message)
    }

    pub(crate) fn deadline(timeout: Duration, generated_tokens: u32) -> Self {
        let seconds = timeout.as_secs_f64();
        let message = format!("stopped by its deadline of {seconds} s after {generated_tokens} tokens");
        let mut error = Self::local(ErrorKind::DeadlineExceeded, Code::DeadlineExceeded, "DEADLINE", message);
        error.0.metadata.insert("timeout_seconds".to_owned(), seconds.to_string());
        error.0.metadata.insert("generated_tokens".to_owned(), generated_tokens.to_string());
        error
    }

    /// The typed error of a failed call; `generated_tokens` is None when not even the first event had arrived.
    pub(crate) fn of(status: &Status, target: &str, timeout: Duration, generated_tokens: Option<u32>) -> Self {
        // The server's clock and ours end the same call: whichever is first, the caller reads the same. (The transport
        // reports its own clock as a cancellation.)
        let is_past = status.code() == Code::Cancelled && status.message() == "Timeout expired";
        if status.code() == Code::DeadlineExceeded || is_past {
            return Self::deadline(timeout, generated_tokens.unwrap_or(0));
        }
        let details = status.get_error_details();
        let reason = details.error_info().map_or("", |info| info.reason.as_str());
        let is_lost = match status.code() {
            Code::Unavailable => true,
            Code::Internal | Code::Unknown | Code::Cancelled => generated_tokens.is_some() || status.source().is_some(),
            _ => false,
        };
        if reason.is_empty() && is_lost {
            return Self::without_answer(status, target, generated_tokens);
        }
        let message = if status.message().is_empty() { status.code().description() } else { status.message() };
        let mut error = Self::local(kind_of(status.code(), reason), status.code(), reason, message.to_owned());
        error.0.metadata = details.error_info().map(|info| info.metadata.clone()).unwrap_or_default();
        error.0.violations = details.bad_request().map(|request| request.field_violations.clone()).unwrap_or_default();
        error.0.retry_after = details.retry_info().and_then(|info| info.retry_delay);
        error.0.pushback_ms = pushback_of(status);
        error
    }

    /// How long to wait before a call that has not been answered is tried again; None: it must not be.
    pub(crate) fn retry_pause(&self, backoff: Duration) -> Option<Duration> {
        match (self.code, self.pushback_ms) {
            (Code::Unavailable | Code::ResourceExhausted, Some(ms)) => ms.try_into().map(Duration::from_millis).ok(),
            (Code::Unavailable, None) => Some(backoff),
            _ => None,
        }
    }

    /// Whether the same may succeed soon: the connection was lost, or the server is full and says for how long.
    pub(crate) fn is_transient(&self) -> bool {
        match self.kind {
            ErrorKind::Unavailable | ErrorKind::StreamCut => true,
            ErrorKind::Overloaded => self.retry_after.is_some(),
            _ => false,
        }
    }

    /// Whether the server has lost the end of its log, and what lies before it is whole.
    pub(crate) fn is_lost_point(&self) -> bool {
        matches!(self.reason.as_str(), "RESUME_POINT_GONE" | "CHECKPOINT_DAMAGED")
    }

    fn without_answer(status: &Status, target: &str, generated_tokens: Option<u32>) -> Self {
        let (reason, message) = match generated_tokens {
            Some(tokens) => ("CONNECTION_LOST", format!("{target} went away after {tokens} tokens")),
            None if is_unresolved(status) => {
                ("UNRESOLVABLE_TARGET", format!("the target {target} leads to no address"))
            }
            None if has_refused(status) => ("UNREACHABLE", format!("no server answers at {target}")),
            None => ("CONNECTION_LOST", format!("{target} went away before it answered ({})", status.message())),
        };
        let mut error = Self::local(ErrorKind::Unavailable, Code::Unavailable, reason, message);
        error.0.metadata.insert("target".to_owned(), target.to_owned());
        error.0.pushback_ms = pushback_of(status);
        error
    }
}

fn kind_of(code: Code, reason: &str) -> ErrorKind {
    match code {
        Code::InvalidArgument if reason == "PROMPT_TOO_LONG" => ErrorKind::PromptTooLong,
        Code::InvalidArgument => ErrorKind::InvalidRequest,
        Code::OutOfRange => ErrorKind::OutOfRange,
        Code::NotFound => ErrorKind::NotFound,
        Code::AlreadyExists => ErrorKind::AlreadyExists,
        Code::FailedPrecondition => ErrorKind::FailedPrecondition,
        Code::ResourceExhausted => ErrorKind::Overloaded,
        Code::Unavailable => ErrorKind::Unavailable,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::Unauthenticated | Code::PermissionDenied => ErrorKind::Authentication,
        Code::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        Code::Cancelled => ErrorKind::Cancelled,
        Code::DataLoss => ErrorKind::DataLoss,
        _ => ErrorKind::Server,
    }
}

fn pushback_of(status: &Status) -> Option<i64> {
    status.metadata().get("grpc-retry-pushback-ms")?.to_str().ok()?.parse().ok()
}

/// What the system said, where it is the cause.
fn system_error(status: &Status) -> Option<&std::io::Error> {
    let first = status.source();
    std::iter::successors(first, |error| (**error).source()).find_map(|error| error.downcast_ref())
}

fn is_unresolved(status: &Status) -> bool {
    system_error(status).is_some_and(|error| error.to_string().contains("lookup address"))
}

/// Whether nobody was reached at all.
fn has_refused(status: &Status) -> bool {
    system_error(status).is_some_and(|error| error.kind() != std::io::ErrorKind::ConnectionReset)
}
