//! The client: a thin layer over the generated stubs, which adds deadlines, limits, retries and typed errors.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataMap;
use tonic::service::interceptor::InterceptedService;
use tonic::{Response, Status, Streaming};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_prost::ProstCodec;

use crate::Error;
use crate::connection::{Headers, MESSAGE_LIMIT_BYTES, Servers, Tls, Transport, add_metadata};
use crate::reader::{MOST_ATTEMPTS, Reader, Reading, backoff};
use crate::stream::TextStream;
use crate::v1::abort_request::Target;
use crate::v1::admin_service_client::AdminServiceClient;
use crate::v1::generation_service_client::GenerationServiceClient;
use crate::v1::model_service_client::ModelServiceClient;
use crate::v1::{AbortRequest, AbortResponse, CompleteRequest, CompleteResponse, GenerateRequest};
use crate::v1::{GetModelRequest, ModelInfo};

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// How long telling the server of durable streams that were left may take.
const FAREWELL: Duration = Duration::from_secs(2);
const NO_DEADLINE: Duration = Duration::from_secs(86_400 * 365);

/// A client in plain text for "HOST:PORT" or "unix:PATH"; the network is touched by the first call.
pub fn connect(target: &str) -> Result<Client, Error> {
    Connect::to([target]).connect()
}

/// Settings of a connection.
#[derive(Clone, Debug)]
pub struct Connect {
    targets: Vec<String>,
    tls: Option<Tls>,
    metadata: Vec<(String, String)>,
    timeout: Duration,
}

impl Connect {
    /// Whom to ask: several take turns, each while its health says that it serves.
    pub fn to<'a>(targets: impl IntoIterator<Item = &'a str>) -> Self {
        let targets = targets.into_iter().map(str::to_owned).collect();
        Self { targets, tls: None, metadata: Vec::new(), timeout: DEFAULT_TIMEOUT }
    }

    /// TLS in place of plain text.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// A bearer token, sent with every call.
    pub fn token(self, token: &str) -> Self {
        self.metadata("authorization", &format!("Bearer {token}"))
    }

    /// A value that is sent with every call.
    pub fn metadata(mut self, name: &str, value: &str) -> Self {
        self.metadata.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Deadline of every call; 600 seconds by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The client; an error of kind `InvalidRequest` names a setting that cannot be one.
    pub fn connect(self) -> Result<Client, Error> {
        let mut metadata = MetadataMap::new();
        for (name, value) in &self.metadata {
            add_metadata(&mut metadata, name, value)?;
        }
        let servers = Arc::new(Servers::new(&self.targets, self.tls.as_ref())?);
        Ok(Client {
            servers,
            target: self.targets.join(", ").into(),
            metadata: metadata.into(),
            timeout: self.timeout,
            closed: CancellationToken::new(),
            readings: Arc::default(),
        })
    }
}

/// Talks to one server, or to several in turn. Cheap to clone: clones share the connection, which ends with the last, and
/// belongs to the runtime of the first call. A program that has read durable streams calls [`Client::close`] before it ends.
#[derive(Clone, Debug)]
pub struct Client {
    servers: Arc<Servers>,
    target: Arc<str>,
    metadata: Arc<MetadataMap>,
    timeout: Duration,
    closed: CancellationToken,
    readings: Readings,
}

/// The readers at work, and those that were left, until the server has been told.
type Readings = Arc<Mutex<Vec<Arc<Reading>>>>;

fn lock(readings: &Readings) -> MutexGuard<'_, Vec<Arc<Reading>>> {
    readings.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Held by a reader's task: when it ends, or its runtime does, nobody need wait for it any more.
pub(crate) struct Begun(Readings, Arc<Reading>);

impl Drop for Begun {
    fn drop(&mut self) {
        self.1.over.cancel();
        lock(&self.0).retain(|reading| !Arc::ptr_eq(reading, &self.1));
    }
}

impl Client {
    /// The same client with another deadline for its calls.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// The same client, whose generations leave the queue sooner the higher this is: from -100 to 100, else 0.
    pub fn with_priority(&self, priority: i32) -> Self {
        let mut metadata = self.metadata.as_ref().clone();
        metadata.insert("mlx-stream-priority", priority.into());
        Self { metadata: metadata.into(), ..self.clone() }
    }

    /// End everything that still runs, of this client and its clones; whoever waits for it gets an error of kind `Cancelled`
    /// with the reason CLIENT_CLOSED, as does whoever calls later. Then wait, two seconds at most, until the server has been
    /// told of the durable streams, and of those that were left before: it would wait for somebody who comes back.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), mlxstream::Error> {
    /// let client = mlxstream::connect("127.0.0.1:50051")?;
    /// let twin = client.clone();
    /// let mut open = client.stream(mlxstream::text("Once upon a time"));
    /// client.close().await;
    /// for stream in [&mut open, &mut twin.stream(mlxstream::text("Once more"))] {
    ///     assert_eq!(stream.next().await.unwrap().unwrap_err().reason, "CLIENT_CLOSED");
    ///     assert!(stream.next().await.is_none());
    /// }
    /// assert_eq!(twin.model().await.unwrap_err().reason, "CLIENT_CLOSED");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn close(self) {
        self.closed.cancel();
        let readings = lock(&self.readings).clone();
        let all_over = async {
            for reading in readings {
                reading.over.cancelled().await
            }
        };
        let _ = timeout(FAREWELL, all_over).await;
    }

    /// Generate, and give the text as it comes: `client.stream(text("Once upon a time"))`.
    pub fn stream(&self, request: impl Into<GenerateRequest>) -> TextStream {
        self.reading(Reader::new(self.clone(), request.into(), None))
    }

    /// Go on with a durable generation after the event with this number; 0 begins at its first.
    pub fn resume(&self, generation_id: impl Into<String>, after_sequence: u64) -> TextStream {
        let point = (generation_id.into(), after_sequence);
        self.reading(Reader::new(self.clone(), GenerateRequest::default(), Some(point)))
    }

    fn reading(&self, reader: Reader) -> TextStream {
        let (left, sequence) = (reader.left(), reader.sequence());
        TextStream::new(reader, left, self.closed.clone(), sequence)
    }

    /// Generate, and give all of it at the end.
    pub async fn generate(&self, request: impl Into<GenerateRequest>) -> Result<CompleteResponse, Error> {
        let packed = request.into().encode_to_vec();
        let same = CompleteRequest::decode(packed.as_slice()).expect("their fields and numbers are the same");
        let deadline = self.deadline();
        let mut call = self.repeated(deadline, None, |transport| complete(transport, same.clone())).await?;
        let answered = async {
            let answer = call.message().await?;
            call.trailers().await?;
            Ok::<_, Status>(answer)
        };
        self.bounded(deadline, answered).await?.ok_or_else(Error::stream_cut)
    }

    /// End a generation by the caller's name for it. One that does not run (any more) is not an error.
    pub async fn abort(&self, request_id: impl Into<String>) -> Result<AbortResponse, Error> {
        self.abort_target(Target::RequestId(request_id.into()), 0).await
    }

    /// End a generation by the server's id of it. One that does not run (any more) is not an error.
    pub async fn abort_generation(&self, generation_id: impl Into<String>) -> Result<AbortResponse, Error> {
        self.abort_target(Target::GenerationId(generation_id.into()), 0).await
    }

    /// What is known about the served model.
    pub async fn model(&self) -> Result<ModelInfo, Error> {
        let answer = self.models(|mut stub| async move { stub.get_model(GetModelRequest::default()).await }).await?;
        Ok(answer.model.unwrap_or_default())
    }

    /// Make a call of the ModelService: `client.models(|mut stub| async move { stub.tokenize(request).await })`. It may be
    /// made more than once, until the server takes it up.
    pub async fn models<T, F>(&self, call: impl Fn(ModelServiceClient<Transport>) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let made = |transport| call(ModelServiceClient::new(transport).max_decoding_message_size(MESSAGE_LIMIT_BYTES));
        self.repeated(self.deadline(), None, made).await.map(Response::into_inner)
    }

    /// Make a call of the AdminService, once: `client.admin(|mut stub| async move { stub.drain(request).await })`.
    pub async fn admin<T, F>(&self, call: impl FnOnce(AdminServiceClient<Transport>) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let deadline = self.deadline();
        let answered = async {
            let transport = self.transport(self.next().await, Some(deadline));
            call(AdminServiceClient::new(transport).max_decoding_message_size(MESSAGE_LIMIT_BYTES)).await
        };
        self.bounded(deadline, answered).await.map(Response::into_inner)
    }

    /// Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness.
    pub async fn health(&self, service: &str) -> Result<&'static str, Error> {
        let deadline = self.deadline();
        let request = HealthCheckRequest { service: service.to_owned() };
        let answered = async {
            let transport = self.transport(self.next().await, Some(deadline));
            HealthClient::new(transport).check(request).await
        };
        Ok(self.bounded(deadline, answered).await?.get_ref().status().as_str_name())
    }

    /// Follow the health of a service, its status now first, for as long as `more` says so. It has no deadline.
    pub async fn watch_health(&self, service: &str, mut more: impl FnMut(&'static str) -> bool) -> Result<(), Error> {
        let request = HealthCheckRequest { service: service.to_owned() };
        let watched = async {
            let transport = self.transport(self.next().await, None);
            let mut statuses = HealthClient::new(transport).watch(request).await?.into_inner();
            while let Some(status) = statuses.message().await? {
                if !more(ServingStatus::try_from(status.status).unwrap_or(ServingStatus::Unknown).as_str_name()) {
                    break;
                }
            }
            Ok(())
        };
        self.unless_closed(watched).await?.map_err(|status| self.error(&status, None))
    }

    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout.min(NO_DEADLINE)
    }

    pub(crate) fn error(&self, status: &Status, generated_tokens: Option<u32>) -> Error {
        Error::of(status, &self.target, self.timeout, generated_tokens)
    }

    pub(crate) fn servers(&self) -> usize {
        self.servers.count()
    }

    /// Whose turn it is.
    pub(crate) async fn next(&self) -> usize {
        self.servers.next().await
    }

    /// What a call to one of the servers runs on, for so long; None: without a deadline.
    pub(crate) fn transport(&self, server: usize, deadline: Option<Instant>) -> Transport {
        let headers = Headers { metadata: self.metadata.as_ref().clone(), deadline };
        InterceptedService::new(self.servers.channel(server), headers)
    }

    /// Note that a reader is at work, until what this gives is dropped.
    pub(crate) fn begin(&self, reading: Arc<Reading>) -> Begun {
        lock(&self.readings).push(reading.clone());
        Begun(self.readings.clone(), reading)
    }

    /// Tell the servers, from this one on, of a durable generation that nobody reads any more.
    pub(crate) async fn part(&self, generation: Target, server: usize) {
        let outliving = Self { timeout: FAREWELL, closed: CancellationToken::new(), ..self.clone() };
        let _ = outliving.abort_target(generation, server).await;
    }

    /// Wait until a generation that was left is ended: a farewell that comes late would end what is resumed.
    pub(crate) async fn has_parted(&self, generation_id: &str) {
        let readings = lock(&self.readings).clone();
        for reading in readings.iter().filter(|reading| reading.left.is_cancelled()) {
            if reading.generation_id.get().is_some_and(|id| id == generation_id) {
                reading.over.cancelled().await;
            }
        }
    }

    /// Ask one server after the other, until one knows the generation: that one tells its account.
    async fn abort_target(&self, target: Target, first: usize) -> Result<AbortResponse, Error> {
        let (request, deadline) = (AbortRequest { target: Some(target) }, self.deadline());
        let call = |transport| {
            let (mut stub, request) = (generations(transport), request.clone());
            async move { stub.abort(request).await }
        };
        let mut verdict = None;
        for place in 0..self.servers() {
            let server = (first + place) % self.servers();
            let told = self.repeated(deadline, Some(server), call).await.map(Response::into_inner);
            if told.as_ref().is_ok_and(|answer| answer.stats.is_some()) {
                return told;
            }
            verdict = verdict.filter(Result::is_ok).or(Some(told));
        }
        verdict.expect("there is at least one server")
    }

    /// Make a call, again while the server has not taken it up and allows it; None: each time at the next server.
    async fn repeated<T, F>(
        &self,
        deadline: Instant,
        server: Option<usize>,
        call: impl Fn(Transport) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut failures = 0;
        loop {
            let attempt = async {
                let server = match server {
                    Some(server) => server,
                    None => self.next().await,
                };
                call(self.transport(server, Some(deadline))).await
            };
            let error = match self.bounded(deadline, attempt).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            failures += 1;
            match error.retry_pause(backoff(failures - 1)) {
                Some(pause) if failures < MOST_ATTEMPTS && Instant::now() + pause < deadline => sleep(pause).await,
                _ => return Err(error),
            }
        }
    }

    async fn bounded<T>(&self, deadline: Instant, call: impl Future<Output = Result<T, Status>>) -> Result<T, Error> {
        match self.unless_closed(timeout_at(deadline, call)).await? {
            Ok(answer) => answer.map_err(|status| self.error(&status, None)),
            Err(_) => Err(Error::deadline(self.timeout, 0)),
        }
    }

    async fn unless_closed<T>(&self, call: impl Future<Output = T>) -> Result<T, Error> {
        tokio::select! {
            biased;
            () = self.closed.cancelled() => Err(Error::client_closed()),
            answer = call => Ok(answer),
        }
    }
}

pub(crate) fn generations(transport: Transport) -> GenerationServiceClient<Transport> {
    GenerationServiceClient::new(transport)
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES)
}

/// Begin the unary call. The stub would wait for the answer; this returns with its headers, by which the server says that it
/// has taken the request up: from then on the call must not be made again.
async fn complete(transport: Transport, request: CompleteRequest) -> Result<Streaming<CompleteResponse>, Status> {
    let mut grpc = Grpc::new(transport)
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES);
    grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let path = PathAndQuery::from_static("/mlxstream.v1.GenerationService/Complete");
    let codec = ProstCodec::<CompleteRequest, CompleteResponse>::default();
    grpc.server_streaming(tonic::Request::new(request), path, codec).await.map(Response::into_inner)
}
