//! Reads one generation through as many calls as it takes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Response, Status, Streaming};

use crate::Error;
use crate::client::Client;
use crate::v1::abort_request::Target;
use crate::v1::generate_response::Event;
use crate::v1::{Finished, GenerateRequest, GenerateResponse, ResumeRequest, Started, TokenChunk};

pub(crate) const MOST_ATTEMPTS: u32 = 4;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What has been shown of a generation, the name by which the server knows it, and where its calls run.
pub(crate) struct Account {
    pub(crate) name: Target,
    pub(crate) runtime: Option<Handle>,
    pub(crate) started: Option<Started>,
    pub(crate) finished: Option<Finished>,
    pub(crate) sequence: u64,
    pub(crate) generated_tokens: u32,
}

impl Account {
    pub(crate) fn of(opening: &Opening) -> Self {
        let (name, sequence) = match opening {
            Opening::Generate(request) => (Target::RequestId(request.request_id.clone()), 0),
            Opening::Resume(request) => (Target::GenerationId(request.generation_id.clone()), request.after_sequence),
        };
        Self { name, runtime: None, started: None, finished: None, sequence, generated_tokens: 0 }
    }

    /// Note what matters of an event.
    fn take(&mut self, response: &GenerateResponse) {
        match &response.event {
            Some(Event::Started(started)) => {
                self.name = Target::GenerationId(started.generation_id.clone());
                self.started = Some(started.clone());
            }
            Some(Event::Finished(finished)) => self.finished = Some(finished.clone()),
            Some(Event::Chunk(chunk)) => {
                self.generated_tokens = chunk.tokens.last().map_or(self.generated_tokens, |token| token.index + 1);
            }
            _ => {} // heartbeats, canvases, and whatever a newer server sends
        }
    }

    fn arrived_tokens(&self) -> Option<u32> {
        self.started.as_ref().map(|_| self.generated_tokens)
    }
}

/// How a stream begins.
pub(crate) enum Opening {
    Generate(Box<GenerateRequest>),
    Resume(ResumeRequest),
}

/// Owns the calls of one generation. A durable one is resumed where it was cut off; whoever reads sees everything once.
pub(crate) struct Reader {
    client: Client,
    opening: Opening,
    is_durable: bool,
    first_sequence: u64,
    account: Arc<Mutex<Account>>,
    deadline: Option<Instant>,
    call: Option<Streaming<GenerateResponse>>,
    /// Whether the server has answered with headers: it has taken the request up.
    is_accepted: bool,
    failures: u32,
    /// Characters that came since the first message, known ones included when all is said again.
    place: usize,
    /// How many of them have been shown.
    characters: usize,
    /// The end of a durable generation that failed: what follows shows whether it is the end.
    held: Option<GenerateResponse>,
    /// What the stream fails with, once the held event was given.
    failure: Option<Error>,
}

impl Reader {
    pub(crate) fn new(client: Client, opening: Opening, is_durable: bool, account: Arc<Mutex<Account>>) -> Self {
        let first_sequence = lock(&account).sequence;
        Self {
            client,
            opening,
            is_durable,
            first_sequence,
            account,
            deadline: None,
            call: None,
            is_accepted: false,
            failures: 0,
            place: 0,
            characters: 0,
            held: None,
            failure: None,
        }
    }

    pub(crate) fn events(self) -> impl Stream<Item = Result<GenerateResponse, Error>> + Send {
        unfold(self, |mut reader| async move { reader.read().await.map(|item| (item, reader)) })
    }

    /// The next event that the caller has not had; None after the last one.
    async fn read(&mut self) -> Option<Result<GenerateResponse, Error>> {
        let deadline = *self.deadline.get_or_insert_with(|| self.client.deadline());
        while self.failure.is_none() {
            let error = match timeout_at(deadline, self.step(deadline)).await {
                Ok(Ok(Some(response))) => match self.news(response) {
                    Some(response) => return Some(Ok(response)),
                    None => continue,
                },
                Ok(Ok(None)) => return None,
                Ok(Err(error)) => error,
                Err(_) => Error::deadline(self.client.timeout(), lock(&self.account).generated_tokens),
            };
            match self.pause_after(&error).filter(|pause| Instant::now() + *pause < deadline) {
                Some(pause) => {
                    self.failures += 1;
                    self.held = None;
                    sleep(pause).await;
                }
                None => self.failure = Some(error),
            }
        }
        match self.held.take() {
            Some(response) => {
                lock(&self.account).take(&response);
                Some(Ok(response))
            }
            None => self.failure.take().map(Err),
        }
    }

    /// The next message of the call in hand, or of the next one; None when the generation has ended.
    async fn step(&mut self, deadline: Instant) -> Result<Option<GenerateResponse>, Error> {
        let mut call = match self.call.take() {
            Some(call) => call,
            None => self.open(deadline).await?,
        };
        match call.message().await {
            Ok(Some(response)) => {
                self.call = Some(call);
                Ok(Some(response))
            }
            Ok(None) if lock(&self.account).finished.is_some() => Ok(None),
            Ok(None) => Err(Error::stream_cut()),
            Err(status) => Err(self.failed(&status)),
        }
    }

    async fn open(&mut self, deadline: Instant) -> Result<Streaming<GenerateResponse>, Error> {
        let mut stub = self.client.generations(deadline).await;
        if let Opening::Resume(request) = &self.opening {
            self.client.has_parted(&request.generation_id).await;
        }
        let (begun, after_sequence) = {
            let mut account = lock(&self.account);
            account.runtime = Handle::try_current().ok();
            (account.started.as_ref().map(|started| started.generation_id.clone()), account.sequence)
        };
        if after_sequence == self.first_sequence {
            self.place = 0;
        }
        let answer = match (begun, &self.opening) {
            (Some(generation_id), _) => stub.resume(ResumeRequest { generation_id, after_sequence }).await,
            (None, Opening::Generate(request)) => stub.generate(request.as_ref().clone()).await,
            (None, Opening::Resume(request)) => stub.resume(request.clone()).await,
        };
        self.is_accepted |= answer.is_ok();
        answer.map(Response::into_inner).map_err(|status| self.failed(&status))
    }

    fn failed(&self, status: &Status) -> Error {
        self.client.error(status, lock(&self.account).arrived_tokens())
    }

    /// What the caller has not had of a message; None if that is nothing.
    fn news(&mut self, mut response: GenerateResponse) -> Option<GenerateResponse> {
        self.failures = 0;
        lock(&self.account).sequence = response.sequence;
        if self.is_durable && matches!(&response.event, Some(Event::Finished(finished)) if finished.error.is_some()) {
            self.held = Some(response);
            return None;
        }
        let is_new = match &mut response.event {
            Some(Event::Started(_)) => lock(&self.account).started.is_none(),
            Some(Event::Chunk(chunk)) if self.is_durable => self.cut_known(chunk),
            _ => true,
        };
        is_new.then(|| {
            lock(&self.account).take(&response);
            response
        })
    }

    /// Leave of a chunk what no earlier call has brought; false if nothing is left.
    fn cut_known(&mut self, chunk: &mut TokenChunk) -> bool {
        let generated_tokens = lock(&self.account).generated_tokens;
        chunk.tokens.retain(|token| token.index >= generated_tokens);
        let known = self.characters - self.place.min(self.characters);
        self.place += chunk.text.chars().count();
        self.characters = self.characters.max(self.place);
        if known > 0 {
            chunk.text = chunk.text.chars().skip(known).collect();
        }
        !(chunk.tokens.is_empty() && chunk.text.is_empty())
    }

    /// How long to wait before the reader goes on; None: it must not.
    fn pause_after(&mut self, error: &Error) -> Option<Duration> {
        let backoff = backoff(self.failures);
        let mut account = lock(&self.account);
        if account.started.is_none() {
            let may_repeat = !self.is_accepted && self.failures + 1 < MOST_ATTEMPTS;
            return error.retry_pause(backoff).filter(|_| may_repeat);
        }
        if !self.is_durable || account.finished.is_some() {
            return None;
        }
        if error.is_lost_point() && account.sequence != self.first_sequence {
            account.sequence = self.first_sequence; // the server has lost the end of its log, and says everything again
            return Some(backoff);
        }
        error.is_transient().then(|| backoff.max(error.retry_after.unwrap_or_default()))
    }
}

/// The pause after so many failures: 0.1 s, doubled each time, at most 2 s, and a fifth more or less.
pub(crate) fn backoff(failures: u32) -> Duration {
    let base = Duration::from_millis(100 << failures.min(5)).min(Duration::from_secs(2));
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
    base.mul_f64(0.8 + f64::from(nanos % 1000) * 0.0004)
}
