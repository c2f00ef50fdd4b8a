//! One generation as it happens: a stream of its text or its events, and its account.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{empty, unfold};
use futures_util::{Stream, StreamExt};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Streaming;

use crate::client::Client;
use crate::v1::generate_response::Event;
use crate::v1::{FinishReason, Finished, GenerateRequest, GenerateResponse, GenerateStats, ResumeRequest, Started};
use crate::{Error, Request};

pub(crate) const MOST_ATTEMPTS: u32 = 4;

/// What a generation has used so far, in tokens. `cached_tokens` are part of `prompt_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Prompt tokens whose state was already there.
    pub cached_tokens: u32,
    /// Tokens that were generated.
    pub generated_tokens: u32,
}

/// One generation. It is a [`Stream`] of its text; [`TextStream::next_event`] gives everything. The first read sends it.
///
/// Dropping it ends the generation on the server, as do [`TextStream::cancel`] and a [`Canceller`] from elsewhere. A
/// durable generation goes on by itself after a lost connection.
pub struct TextStream {
    events: Pin<Box<dyn Stream<Item = Result<GenerateResponse, Error>> + Send>>,
    shared: Arc<Shared>,
    client: Client,
    is_durable: bool,
}

/// Ends a generation from anywhere: its reader stops without an error.
#[derive(Clone)]
pub struct Canceller(Arc<Shared>);

impl Canceller {
    /// End it now; without effect once it has ended.
    pub fn cancel(&self) {
        self.0.has_left.send_replace(true);
    }
}

impl TextStream {
    pub(crate) fn generate(client: Client, request: Request) -> Self {
        let is_durable = request.message.delivery.as_ref().is_some_and(|delivery| delivery.durable);
        let client = match request.priority {
            Some(priority) => client.with_priority(priority),
            None => client,
        };
        Self::new(client, Opening::Generate(Box::new(request.message)), is_durable)
    }

    pub(crate) fn resume(client: Client, request: ResumeRequest) -> Self {
        Self::new(client, Opening::Resume(request), true)
    }

    fn new(client: Client, opening: Opening, is_durable: bool) -> Self {
        let shared = Arc::new(Shared { has_left: watch::channel(false).0, account: Mutex::default() });
        let reader = Reader {
            client: client.clone(),
            opening,
            is_durable,
            shared: shared.clone(),
            has_left: shared.has_left.subscribe(),
            deadline: None,
            call: None,
            failures: 0,
        };
        let events = unfold(reader, |mut reader| async move { reader.read().await.map(|item| (item, reader)) }).fuse();
        Self { events: Box::pin(events), shared, client, is_durable }
    }

    /// The next piece of text; None at the end. Joined, the pieces are the completion.
    pub async fn next(&mut self) -> Option<Result<String, Error>> {
        StreamExt::next(self).await
    }

    /// The next message of the stream, of any kind; None after the last one.
    pub async fn next_event(&mut self) -> Option<Result<GenerateResponse, Error>> {
        self.events.next().await
    }

    /// End the generation now. Its account stays.
    pub fn cancel(&mut self) {
        self.events = Box::pin(empty()); // drops the call
        self.shared.leave(&self.client, self.is_durable);
    }

    /// What ends the generation from elsewhere, while this stream is being read.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.shared.clone())
    }

    /// The first event; None before it.
    pub fn started(&self) -> Option<Started> {
        self.shared.account().started.clone()
    }

    /// The last event; None before it, and when the generation was left early.
    pub fn finished(&self) -> Option<Finished> {
        self.shared.account().finished.clone()
    }

    /// Why the generation ended; None before it has. A value that this client does not know counts as unspecified.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished().map(|finished| finished.finish_reason())
    }

    /// The account of the whole generation; None before its end.
    pub fn stats(&self) -> Option<GenerateStats> {
        self.finished().and_then(|finished| finished.stats)
    }

    /// Number of the last event that was received; [`Client::resume`] takes it.
    pub fn sequence(&self) -> u64 {
        self.shared.account().sequence
    }

    /// The tokens used so far, by what has arrived; final once the generation has ended.
    pub fn usage(&self) -> Usage {
        let started = self.started().unwrap_or_default();
        let generated_tokens = self.shared.account().generated_tokens;
        Usage {
            prompt_tokens: started.prompt_tokens,
            cached_tokens: started.cached_tokens,
            generated_tokens: self.stats().map_or(generated_tokens, |stats| stats.generated_tokens),
        }
    }
}

impl Stream for TextStream {
    type Item = Result<String, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match self.events.as_mut().poll_next(context) {
                Poll::Ready(Some(Ok(GenerateResponse { event: Some(Event::Chunk(chunk)), .. })))
                    if !chunk.text.is_empty() =>
                {
                    return Poll::Ready(Some(Ok(chunk.text)));
                }
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        self.shared.leave(&self.client, self.is_durable); // the call itself ends with its reader
    }
}

struct Shared {
    has_left: watch::Sender<bool>,
    account: Mutex<Account>,
}

impl Shared {
    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Note that the generation is left, if it still runs. A durable one does not end with its call: end it by name.
    fn leave(&self, client: &Client, is_durable: bool) {
        let mut account = self.account();
        if std::mem::replace(&mut account.is_over, true) {
            return;
        }
        if let (true, Some(started), None) = (is_durable, &account.started, &account.finished) {
            client.abort_in_background(started.generation_id.clone());
        }
    }
}

#[derive(Default)]
struct Account {
    started: Option<Started>,
    finished: Option<Finished>,
    sequence: u64,
    generated_tokens: u32,
    is_over: bool,
}

enum Opening {
    Generate(Box<GenerateRequest>),
    Resume(ResumeRequest),
}

/// Owns the calls of one generation.
struct Reader {
    client: Client,
    opening: Opening,
    is_durable: bool,
    shared: Arc<Shared>,
    has_left: watch::Receiver<bool>,
    deadline: Option<Instant>,
    call: Option<Streaming<GenerateResponse>>,
    failures: u32,
}

impl Reader {
    /// The next event; None after the last one, and after a cancellation.
    async fn read(&mut self) -> Option<Result<GenerateResponse, Error>> {
        let deadline = *self.deadline.get_or_insert_with(|| self.client.deadline());
        let mut has_left = self.has_left.clone();
        while !self.shared.account().is_over {
            let step = tokio::select! {
                biased;
                _ = has_left.wait_for(|left| *left) => break,
                step = tokio::time::timeout_at(deadline, self.step(deadline)) => step,
            };
            let error = match step {
                Ok(Ok(Some(response))) => return Some(Ok(response)),
                Ok(Ok(None)) => return self.ended_by(None),
                Ok(Err(error)) => error,
                Err(_) => self.past_deadline(),
            };
            self.call = None;
            let Some(pause) = self.pause_after(&error).filter(|pause| Instant::now() + *pause < deadline) else {
                return self.ended_by(Some(error));
            };
            self.failures += 1;
            tokio::select! {
                _ = has_left.wait_for(|left| *left) => break,
                () = tokio::time::sleep(pause) => {}
            }
        }
        self.call = None; // resets its stream
        self.shared.leave(&self.client, self.is_durable);
        None
    }

    fn ended_by(&mut self, error: Option<Error>) -> Option<Result<GenerateResponse, Error>> {
        self.shared.account().is_over = true;
        self.call = None;
        error.map(Err)
    }

    async fn step(&mut self, deadline: Instant) -> Result<Option<GenerateResponse>, Error> {
        if self.call.is_none() {
            self.call = Some(self.open(deadline).await?);
        }
        while let Some(call) = &mut self.call {
            match call.message().await {
                Ok(Some(response)) => {
                    self.failures = 0;
                    if self.remember(&response) {
                        return Ok(Some(response));
                    }
                }
                Ok(None) if self.shared.account().finished.is_some() => return Ok(None),
                Ok(None) => return Err(Error::stream_cut()),
                Err(status) => return Err(self.client.error(&status, self.arrived_tokens())),
            }
        }
        Ok(None)
    }

    async fn open(&mut self, deadline: Instant) -> Result<Streaming<GenerateResponse>, Error> {
        let mut stub = self.client.generations(deadline).await;
        let begun = self.shared.account().started.as_ref().map(|started| started.generation_id.clone());
        let answer = match (begun, &self.opening) {
            (Some(generation_id), _) => {
                let after_sequence = self.shared.account().sequence;
                stub.resume(ResumeRequest { generation_id, after_sequence }).await
            }
            (None, Opening::Generate(request)) => stub.generate(request.as_ref().clone()).await,
            (None, Opening::Resume(request)) => {
                self.client.aborts_are_done().await;
                stub.resume(request.clone()).await
            }
        };
        answer.map(tonic::Response::into_inner).map_err(|status| self.client.error(&status, self.arrived_tokens()))
    }

    /// Note what matters of an event; false for the Started with which a resumed stream begins again.
    fn remember(&self, response: &GenerateResponse) -> bool {
        let mut account = self.shared.account();
        account.sequence = response.sequence;
        match &response.event {
            Some(Event::Started(_)) if account.started.is_some() => return false,
            Some(Event::Started(started)) => account.started = Some(started.clone()),
            Some(Event::Finished(finished)) => account.finished = Some(finished.clone()),
            Some(Event::Chunk(chunk)) => {
                account.generated_tokens =
                    chunk.tokens.last().map_or(account.generated_tokens, |token| token.index + 1);
            }
            _ => {} // heartbeats, canvases, and whatever a newer server sends
        }
        true
    }

    /// How long to wait before the reader goes on; None: it must not.
    fn pause_after(&self, error: &Error) -> Option<Duration> {
        let backoff = backoff(self.failures);
        let account = self.shared.account();
        if account.started.is_none() {
            return error.retry_pause(backoff).filter(|_| self.failures + 1 < MOST_ATTEMPTS);
        }
        let may_go_on = self.is_durable && account.finished.is_none();
        (may_go_on && error.is_connection_lost()).then(|| error.retry_pause(backoff).unwrap_or(backoff))
    }

    fn arrived_tokens(&self) -> Option<u32> {
        let account = self.shared.account();
        account.started.as_ref().map(|_| account.generated_tokens)
    }

    fn past_deadline(&self) -> Error {
        Error::deadline(self.client.timeout(), self.shared.account().generated_tokens)
    }
}

/// The pause after so many failures: 0.1 s, doubled each time, at most 2 s, and a fifth more or less.
pub(crate) fn backoff(failures: u32) -> Duration {
    let base = Duration::from_millis(100 << failures.min(5)).min(Duration::from_secs(2));
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
    base.mul_f64(0.8 + f64::from(nanos % 1000) * 0.0004)
}
