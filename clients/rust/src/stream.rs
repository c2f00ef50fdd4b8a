//! One generation as it happens: a stream of its text or its events, and its account.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::Stream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::reader::Reader;
use crate::v1::generate_response::Event;
use crate::v1::{Finished, GenerateResponse, Started};

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

/// One generation. It is a [`Stream`] of its text; [`TextStream::next_event`] gives everything. The first read sends it,
/// and begins a task of the tokio runtime around it, which makes the calls.
///
/// Dropping it ends the generation on the server, as do [`TextStream::cancel`] and a [`Canceller`] from elsewhere. A
/// durable generation goes on by itself after a lost connection, and is ended by a call of its own, which the runtime
/// makes in the background: [`Client::close`] waits for that. A stream that is still read when the client is closed fails
/// with the reason CLIENT_CLOSED.
///
/// [`Client::close`]: crate::Client::close
pub struct TextStream {
    /// Before the first read.
    reader: Option<Reader>,
    /// From then on; closed when the reader's task has nothing more to say.
    events: Option<mpsc::Receiver<Result<GenerateResponse, Error>>>,
    left: CancellationToken,
    closed: CancellationToken,
    is_over: bool,
    started: Option<Started>,
    finished: Option<Finished>,
    sequence: u64,
    generated_tokens: u32,
}

/// Ends a generation from any thread, at once: its reader stops without an error.
#[derive(Clone, Debug)]
pub struct Canceller(CancellationToken);

impl Canceller {
    /// End it now; without effect once it has ended.
    pub fn cancel(&self) {
        self.0.cancel();
    }
}

impl TextStream {
    /// `left` ends the reader, as does `closed`, which ends with the client.
    pub(crate) fn new(reader: Reader, left: CancellationToken, closed: CancellationToken, sequence: u64) -> Self {
        let (started, finished) = (None, None);
        let (reader, events, is_over) = (Some(reader), None, false);
        Self { reader, events, left, closed, is_over, started, finished, sequence, generated_tokens: 0 }
    }

    /// The next piece of text; None at the end. Joined, the pieces are the completion.
    pub async fn next(&mut self) -> Option<Result<String, Error>> {
        std::future::poll_fn(|context| self.poll_text(context)).await
    }

    /// The next message of the stream, of any kind; None after the last one.
    pub async fn next_event(&mut self) -> Option<Result<GenerateResponse, Error>> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// End the generation now. Its account stays.
    pub fn cancel(&mut self) {
        self.left.cancel();
    }

    /// What ends the generation from elsewhere, whether or not this stream is being read at that moment.
    pub fn canceller(&self) -> Canceller {
        Canceller(self.left.clone())
    }

    /// The first event; None before it.
    pub fn started(&self) -> Option<&Started> {
        self.started.as_ref()
    }

    /// The last event, which says why the generation ended; None before it, and when the generation was left early.
    pub fn finished(&self) -> Option<&Finished> {
        self.finished.as_ref()
    }

    /// Number of the last event that was received; [`Client::resume`] takes it.
    ///
    /// [`Client::resume`]: crate::Client::resume
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The tokens used so far, by what has arrived; final once the generation has ended.
    pub fn usage(&self) -> Usage {
        let stats = self.finished.as_ref().and_then(|finished| finished.stats.as_ref());
        Usage {
            prompt_tokens: self.started.as_ref().map_or(0, |started| started.prompt_tokens),
            cached_tokens: self.started.as_ref().map_or(0, |started| started.cached_tokens),
            generated_tokens: stats.map_or(self.generated_tokens, |stats| stats.generated_tokens),
        }
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<GenerateResponse, Error>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        if !self.has_been_ended() {
            if let Some(reader) = self.reader.take() {
                self.events = Some(reader.begin());
            }
            let events = self.events.as_mut().expect("the reader has begun");
            let event = ready!(events.poll_recv(context));
            if let Some(event) = event.filter(|_| !self.has_been_ended()) {
                match &event {
                    Ok(event) => self.take(event),
                    Err(_) => self.is_over = true,
                }
                return Poll::Ready(Some(event));
            }
        }
        self.is_over = true;
        Poll::Ready(match (self.finished.is_some() || self.left.is_cancelled(), self.closed.is_cancelled()) {
            (true, _) => None,
            (false, true) => Some(Err(Error::client_closed())),
            (false, false) => Some(Err(Error::runtime_ended())),
        })
    }

    fn has_been_ended(&self) -> bool {
        self.left.is_cancelled() || self.closed.is_cancelled()
    }

    fn poll_text(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<String, Error>>> {
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

    /// Note what matters of an event.
    fn take(&mut self, response: &GenerateResponse) {
        self.sequence = response.sequence;
        match &response.event {
            Some(Event::Started(started)) => self.started = Some(started.clone()),
            Some(Event::Finished(finished)) => self.finished = Some(finished.clone()),
            Some(Event::Chunk(chunk)) => {
                self.generated_tokens = chunk.tokens.last().map_or(self.generated_tokens, |token| token.index + 1);
            }
            _ => {} // heartbeats, canvases, and whatever a newer server sends
        }
    }
}

impl Stream for TextStream {
    type Item = Result<String, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_text(context)
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        self.left.cancel();
    }
}
