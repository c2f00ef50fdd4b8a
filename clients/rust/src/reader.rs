//! Reads one generation through as many calls as it takes, in a task of its own.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::{Response, Status, Streaming};

use crate::client::{Client, generations};
use crate::v1::abort_request::Target;
use crate::v1::generate_response::Event;
use crate::v1::{GenerateRequest, GenerateResponse, ResumeRequest, TokenChunk};
use crate::{Error, ErrorKind};

pub(crate) const MOST_ATTEMPTS: u32 = 4;

/// A reader at work, as its client sees it.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    pub(crate) generation_id: OnceLock<String>,
    pub(crate) left: CancellationToken,
    /// The task has ended, and the server been told, if it had to be.
    pub(crate) over: CancellationToken,
}

/// Owns the calls of one generation. A durable one is resumed where it was cut off; whoever reads sees everything once.
pub(crate) struct Reader {
    client: Client,
    request: GenerateRequest,
    is_durable: bool,
    reading: Arc<Reading>,
    first_sequence: u64,
    at: Progress,
    call: Option<Streaming<GenerateResponse>>,
    /// The end of a durable generation that failed: what follows shows whether it is the end.
    held: Option<GenerateResponse>,
}

/// How far a reader is.
#[derive(Default)]
struct Progress {
    sequence: u64,
    has_started: bool,
    has_finished: bool,
    generated_tokens: u32,
    /// Whether anything was sent, and whether the server has answered with headers: it has taken the request up.
    is_sent: bool,
    is_accepted: bool,
    failures: u32,
    /// Who is asked to go on; whether that one has not answered yet, how many in a row have refused, and why.
    server: usize,
    is_asking: bool,
    refusals: usize,
    verdict: Option<Error>,
    /// Characters that came since the first message, known ones included when all is said again; and those shown.
    place: usize,
    characters: usize,
}

impl Reader {
    /// Begin with `request`, or go on with the generation of an id after a message.
    pub(crate) fn new(client: Client, mut request: GenerateRequest, resumed: Option<(String, u64)>) -> Self {
        let is_durable = resumed.is_some() || request.delivery.as_ref().is_some_and(|delivery| delivery.durable);
        if is_durable && request.request_id.is_empty() {
            request.request_id = unique_name(); // tells the server a repetition from a twin
        }
        let (reading, first_sequence) = (Reading::default(), resumed.as_ref().map_or(0, |(_, sequence)| *sequence));
        if let Some((generation_id, _)) = resumed {
            reading.generation_id.get_or_init(|| generation_id);
        }
        Self {
            client,
            request,
            is_durable,
            reading: Arc::new(reading),
            first_sequence,
            at: Progress { sequence: first_sequence, ..Default::default() },
            call: None,
            held: None,
        }
    }

    pub(crate) fn left(&self) -> CancellationToken {
        self.reading.left.clone()
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.first_sequence
    }

    /// Begin the task that reads. What it gives ends when the generation does, or is left.
    pub(crate) fn begin(self) -> mpsc::Receiver<Result<GenerateResponse, Error>> {
        let (sender, receiver) = mpsc::channel(1);
        let guard = self.client.begin(self.reading.clone());
        tokio::spawn(async move {
            self.run(sender).await;
            drop(guard);
        });
        receiver
    }

    async fn run(mut self, events: mpsc::Sender<Result<GenerateResponse, Error>>) {
        let (left, closed) = (self.left(), self.client.closed().clone());
        let ended = tokio::select! {
            biased;
            () = left.cancelled() => None,
            () = closed.cancelled() => None,
            ended = self.read(&events) => Some(ended),
        };
        self.call = None; // what is dropped is reset
        let has_left = match &ended {
            None => true,
            Some(Ok(())) => false,
            Some(Err(error)) => error.kind == ErrorKind::DeadlineExceeded, // else it may be somebody else's by now
        };
        let told = async {
            if let Some(Err(error)) = ended {
                let _ = events.send(Err(error)).await;
            }
            drop(events);
        };
        let parted = async {
            if has_left && self.is_durable && self.at.is_sent && !self.at.has_finished {
                self.client.part(self.name(), self.at.server).await; // it does not end with its call
            }
        };
        tokio::join!(told, parted);
    }

    /// Read to the end of the generation, or to an error.
    async fn read(&mut self, events: &mpsc::Sender<Result<GenerateResponse, Error>>) -> Result<(), Error> {
        let deadline = self.client.deadline();
        loop {
            let error = match timeout_at(deadline, self.step(deadline)).await {
                Ok(Ok(Some(response))) => {
                    if let Some(response) = self.news(response) {
                        let _ = events.send(Ok(response)).await; // whoever drops it leaves
                    }
                    continue;
                }
                Ok(Ok(None)) => return Ok(()),
                Ok(Err(error)) => error,
                Err(_) => Error::deadline(self.client.timeout(), self.at.generated_tokens),
            };
            let Some(error) = self.verdict_on(error) else { continue };
            match self.pause_after(&error).filter(|pause| Instant::now() + *pause < deadline) {
                Some(pause) => {
                    self.at.failures += 1;
                    self.held = None;
                    sleep(pause).await;
                }
                None => {
                    if let Some(held) = self.held.take() {
                        let _ = events.send(Ok(held)).await;
                    }
                    return Err(error);
                }
            }
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
            Ok(None) if self.at.has_finished => Ok(None),
            Ok(None) => Err(Error::stream_cut()),
            Err(status) => Err(self.failed(&status)),
        }
    }

    async fn open(&mut self, deadline: Instant) -> Result<Streaming<GenerateResponse>, Error> {
        if self.at.sequence == self.first_sequence {
            self.at.place = 0;
        }
        let answer = match self.reading.generation_id.get().cloned() {
            Some(generation_id) => {
                self.client.has_parted(&generation_id).await;
                (self.at.is_sent, self.at.is_asking) = (true, true);
                let request = ResumeRequest { generation_id, after_sequence: self.at.sequence };
                generations(self.client.transport(self.at.server, Some(deadline))).resume(request).await
            }
            None => {
                self.at.server = self.client.next().await;
                self.at.is_sent = true;
                generations(self.client.transport(self.at.server, Some(deadline))).generate(self.request.clone()).await
            }
        };
        self.at.is_accepted |= answer.is_ok();
        answer.map(Response::into_inner).map_err(|status| self.failed(&status))
    }

    fn failed(&self, status: &Status) -> Error {
        self.client.error(status, self.at.has_started.then_some(self.at.generated_tokens))
    }

    /// What the caller has not had of a message; None if that is nothing.
    fn news(&mut self, mut response: GenerateResponse) -> Option<GenerateResponse> {
        (self.at.failures, self.at.is_asking, self.at.refusals, self.at.verdict) = (0, false, 0, None);
        self.at.sequence = response.sequence;
        match &mut response.event {
            Some(Event::Started(_)) if self.at.has_started => return None,
            Some(Event::Started(started)) => {
                self.reading.generation_id.get_or_init(|| started.generation_id.clone());
                self.at.has_started = true;
            }
            Some(Event::Finished(finished)) if self.is_durable && finished.error.is_some() => {
                self.held = Some(response);
                return None;
            }
            Some(Event::Finished(_)) => self.at.has_finished = true,
            Some(Event::Chunk(chunk)) => {
                if !self.cut_known(chunk) {
                    return None;
                }
            }
            _ => {}
        }
        Some(response)
    }

    /// Leave of a chunk what no earlier call has brought; false if nothing is left.
    fn cut_known(&mut self, chunk: &mut TokenChunk) -> bool {
        let known = self.at.characters - self.at.place.min(self.at.characters);
        self.at.place += chunk.text.chars().count();
        self.at.characters = self.at.characters.max(self.at.place);
        chunk.tokens.retain(|token| token.index >= self.at.generated_tokens);
        if known > 0 {
            chunk.text = chunk.text.chars().skip(known).collect();
        }
        self.at.generated_tokens = chunk.tokens.last().map_or(self.at.generated_tokens, |token| token.index + 1);
        !(chunk.tokens.is_empty() && chunk.text.is_empty())
    }

    /// What an error comes to. Where a server does not know the generation, or cannot be asked, the next one is: then None.
    /// Whoever could not be asked may know it yet, so that it is not found only where all have said so.
    fn verdict_on(&mut self, error: Error) -> Option<Error> {
        let is_not_found = error.kind == ErrorKind::NotFound;
        if !self.at.is_asking || !(is_not_found || error.is_transient()) {
            return Some(error);
        }
        let verdict = self.at.verdict.take().filter(|_| is_not_found).unwrap_or(error);
        self.at.refusals += 1;
        self.at.server = (self.at.server + 1) % self.client.servers();
        if self.at.refusals < self.client.servers() {
            self.at.verdict = Some(verdict);
            return None;
        }
        self.at.refusals = 0;
        Some(verdict)
    }

    /// How long to wait before the reader goes on; None: it must not.
    fn pause_after(&mut self, error: &Error) -> Option<Duration> {
        let backoff = backoff(self.at.failures);
        if !self.at.has_started {
            let may_repeat = !self.at.is_accepted && self.at.failures + 1 < MOST_ATTEMPTS;
            return error.retry_pause(backoff).filter(|_| may_repeat);
        }
        if !self.is_durable || self.at.has_finished {
            return None;
        }
        if error.is_lost_point() && self.at.sequence != self.first_sequence {
            self.at.sequence = self.first_sequence; // the server has lost the end of its log, and says everything again
            return Some(backoff);
        }
        error.is_transient().then(|| backoff.max(error.retry_after.unwrap_or_default()))
    }

    /// The name by which the server knows the generation.
    fn name(&self) -> Target {
        match self.reading.generation_id.get() {
            Some(generation_id) => Target::GenerationId(generation_id.clone()),
            None => Target::RequestId(self.request.request_id.clone()),
        }
    }
}

/// The pause after so many failures: 0.1 s, doubled each time, at most 2 s, and a fifth more or less.
pub(crate) fn backoff(failures: u32) -> Duration {
    let base = Duration::from_millis(100 << failures.min(5)).min(Duration::from_secs(2));
    base.mul_f64(0.8 + (random() % 1000) as f64 * 0.0004)
}

/// A name that no other request has.
fn unique_name() -> String {
    format!("{:016x}{:016x}", random(), random())
}

/// Of the randomness with which the standard library seeds its maps.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
