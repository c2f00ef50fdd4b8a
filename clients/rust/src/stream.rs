//! One generation as it happens: a stream of its text or its events, and its account.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker, ready};

use futures_util::Stream;

use crate::client::Client;
use crate::reader::{Account, Opening, Reader, lock};
use crate::v1::generate_response::Event;
use crate::v1::{FinishReason, Finished, GenerateResponse, GenerateStats, ResumeRequest, Started};
use crate::{Error, ErrorKind, Request};

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
/// durable generation goes on by itself after a lost connection, and is ended by a call of its own, which the runtime
/// makes in the background: [`Client::close`] waits for that. A stream that is still read when the client is closed fails
/// with the reason CLIENT_CLOSED.
pub struct TextStream(Arc<Generating>);

/// Ends a generation from any thread, at once: its reader stops without an error.
#[derive(Clone)]
pub struct Canceller(Arc<Generating>);

impl Canceller {
    /// End it now; without effect once it has ended.
    pub fn cancel(&self) {
        self.0.leave(None);
    }
}

impl TextStream {
    pub(crate) fn generate(client: Client, request: Request) -> Self {
        let mut message = request.message;
        let is_durable = message.delivery.as_ref().is_some_and(|delivery| delivery.durable);
        if is_durable && message.request_id.is_empty() {
            message.request_id = unique_name(); // tells the server a repetition from a twin
        }
        let client = match request.priority {
            Some(priority) => client.with_priority(priority),
            None => client,
        };
        Self::new(client, Opening::Generate(Box::new(message)), is_durable)
    }

    pub(crate) fn resume(client: Client, request: ResumeRequest) -> Self {
        Self::new(client, Opening::Resume(request), true)
    }

    fn new(client: Client, opening: Opening, is_durable: bool) -> Self {
        let account = Arc::new(Mutex::new(Account::of(&opening)));
        let events = Reader::new(client.clone(), opening, is_durable, account.clone()).events();
        let reading = Reading { events: Some(Box::pin(events)), reader: None, failure: None };
        let generating = Arc::new(Generating { client, is_durable, reading: Mutex::new(reading), account });
        if !generating.client.streams().add(&generating) {
            generating.leave(Some(Error::client_closed()));
        }
        Self(generating)
    }

    /// The next piece of text; None at the end. Joined, the pieces are the completion.
    pub async fn next(&mut self) -> Option<Result<String, Error>> {
        std::future::poll_fn(|context| self.0.poll_text(context)).await
    }

    /// The next message of the stream, of any kind; None after the last one.
    pub async fn next_event(&mut self) -> Option<Result<GenerateResponse, Error>> {
        std::future::poll_fn(|context| self.0.poll_event(context)).await
    }

    /// End the generation now. Its account stays.
    pub fn cancel(&mut self) {
        self.0.leave(None);
    }

    /// What ends the generation from elsewhere, whether or not this stream is being read at that moment.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.0.clone())
    }

    /// The first event; None before it.
    pub fn started(&self) -> Option<Started> {
        lock(&self.0.account).started.clone()
    }

    /// The last event; None before it, and when the generation was left early.
    pub fn finished(&self) -> Option<Finished> {
        lock(&self.0.account).finished.clone()
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
        lock(&self.0.account).sequence
    }

    /// The tokens used so far, by what has arrived; final once the generation has ended.
    pub fn usage(&self) -> Usage {
        let started = self.started().unwrap_or_default();
        let generated_tokens = lock(&self.0.account).generated_tokens;
        Usage {
            prompt_tokens: started.prompt_tokens,
            cached_tokens: started.cached_tokens,
            generated_tokens: self.stats().map_or(generated_tokens, |stats| stats.generated_tokens),
        }
    }
}

impl Stream for TextStream {
    type Item = Result<String, Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_text(context)
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        self.0.leave(None);
    }
}

/// The streams of a client and its clones that somebody still holds; None once it was closed.
#[derive(Debug)]
pub(crate) struct Streams(Mutex<Option<HashMap<usize, Weak<Generating>>>>);

impl Streams {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Some(HashMap::new())))
    }

    /// End all of them, and let none begin any more.
    pub(crate) fn close(&self) {
        let held = lock(&self.0).take();
        for generating in held.into_iter().flatten().filter_map(|(_, stream)| stream.upgrade()) {
            generating.leave(Some(Error::client_closed()));
        }
    }

    /// False once the client was closed.
    fn add(&self, generating: &Arc<Generating>) -> bool {
        let mut held = lock(&self.0);
        let added = held.as_mut().map(|held| held.insert(address(generating), Arc::downgrade(generating)));
        added.is_some()
    }

    fn remove(&self, generating: &Generating) {
        lock(&self.0).as_mut().and_then(|held| held.remove(&address(generating)));
    }
}

/// What tells a generation from every other for as long as somebody refers to it, weakly or not.
fn address(generating: &Generating) -> usize {
    std::ptr::from_ref(generating).addr()
}

/// One generation, for its stream and for whoever may end it.
pub(crate) struct Generating {
    client: Client,
    is_durable: bool,
    reading: Mutex<Reading>,
    account: Arc<Mutex<Account>>,
}

type Events = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Error>> + Send>>;

/// The calls of a generation, and who waits for their next event. Without calls, it is over.
struct Reading {
    events: Option<Events>,
    reader: Option<Waker>,
    /// What its reader is told once, where it was ended without the reader's doing.
    failure: Option<Error>,
}

impl Drop for Generating {
    fn drop(&mut self) {
        self.client.streams().remove(self);
    }
}

impl Generating {
    fn poll_event(&self, context: &mut Context<'_>) -> Poll<Option<Result<GenerateResponse, Error>>> {
        let mut reading = lock(&self.reading);
        let Some(events) = &mut reading.events else { return Poll::Ready(reading.failure.take().map(Err)) };
        let polled = events.as_mut().poll_next(context);
        reading.reader = polled.is_pending().then(|| context.waker().clone());
        if let Poll::Ready(None | Some(Err(_))) = &polled {
            reading.events = None; // it has ended by itself, and may be somebody else's by now
        }
        if matches!(&polled, Poll::Ready(Some(Err(error))) if error.kind == ErrorKind::DeadlineExceeded) {
            self.part();
        }
        polled
    }

    fn poll_text(&self, context: &mut Context<'_>) -> Poll<Option<Result<String, Error>>> {
        loop {
            match ready!(self.poll_event(context)) {
                Some(Ok(GenerateResponse { event: Some(Event::Chunk(chunk)), .. })) if !chunk.text.is_empty() => {
                    return Poll::Ready(Some(Ok(chunk.text)));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
    }

    /// End the generation here and now, if it still runs. Whoever finds it ended finds that its parting is noted.
    fn leave(&self, failure: Option<Error>) {
        let mut reading = lock(&self.reading);
        if reading.events.take().is_none() {
            return;
        }
        reading.failure = failure; // the call was reset when its events were dropped
        self.part();
        let reader = reading.reader.take();
        drop(reading);
        reader.into_iter().for_each(Waker::wake);
    }

    /// A durable generation does not end with its call: end it by its name, if anything was sent.
    fn part(&self) {
        let account = lock(&self.account);
        if let (true, None, Some(runtime)) = (self.is_durable, &account.finished, &account.runtime) {
            self.client.part(account.name.clone(), runtime);
        }
    }
}

/// A name that no other request has, of the randomness with which the standard library seeds its maps.
fn unique_name() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}
