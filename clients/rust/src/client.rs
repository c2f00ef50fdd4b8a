//! The client: a thin layer over the generated stubs, which adds deadlines, limits, retries and typed errors.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataMap;
use tonic::service::interceptor::InterceptedService;
use tonic::{Response, Status, Streaming};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_prost::ProstCodec;

use crate::connection::{Headers, MESSAGE_LIMIT_BYTES, Servers, Tls, Transport, add_metadata};
use crate::reader::{MOST_ATTEMPTS, backoff};
use crate::stream::{Streams, TextStream};
use crate::v1::abort_request::Target;
use crate::v1::admin_service_client::AdminServiceClient;
use crate::v1::generation_service_client::GenerationServiceClient;
use crate::v1::model_service_client::ModelServiceClient;
use crate::v1::{AbortRequest, AbortResponse, CompleteRequest, CompleteResponse, FinishReason, GenerateStats};
use crate::v1::{GeneratedToken, GetModelRequest, ModelInfo, ResumeRequest, Started};
use crate::v1::{complete_request, generate_request};
use crate::{Error, Request};

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
            streams: Arc::new(Streams::new()),
            partings: Arc::new(watch::channel(Vec::new()).0),
        })
    }
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// All text.
    pub text: String,
    /// All tokens, without a terminating end token.
    pub tokens: Vec<GeneratedToken>,
    /// Why it ended; a value that this client does not know counts as unspecified.
    pub finish_reason: FinishReason,
    /// The stop sequence that was met; empty when none was.
    pub matched_stop: String,
    /// Its account.
    pub stats: GenerateStats,
    /// The first event, with the options in effect and the seed.
    pub started: Started,
}

/// Talks to one server, or to several in turn. Cheap to clone: clones share the connection, which ends with the last. A
/// program that has read durable streams calls [`Client::close`] before it ends.
#[derive(Clone, Debug)]
pub struct Client {
    servers: Arc<Servers>,
    target: Arc<str>,
    metadata: Arc<MetadataMap>,
    timeout: Duration,
    streams: Arc<Streams>,
    /// Durable generations that were left, until the server has been told.
    partings: Arc<watch::Sender<Vec<Target>>>,
}

impl Client {
    /// The same client with another deadline for its calls.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// End every stream that still runs, of this client and its clones; whoever reads one gets an error of kind `Cancelled`
    /// with the reason CLIENT_CLOSED, as does whoever opens another. Then wait, two seconds at most, until the server has
    /// been told of the durable ones, and of those that were left before: it would wait for somebody who comes back.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), mlxstream::Error> {
    /// let client = mlxstream::connect("127.0.0.1:50051")?;
    /// let twin = client.clone();
    /// let mut open = client.stream(mlxstream::Request::text("Once upon a time"));
    /// client.close().await;
    /// for stream in [&mut open, &mut twin.stream(mlxstream::Request::text("Once more"))] {
    ///     assert_eq!(stream.next().await.unwrap().unwrap_err().reason, "CLIENT_CLOSED");
    ///     assert!(stream.next().await.is_none());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn close(self) {
        self.streams.close();
        let mut partings = self.partings.subscribe();
        let _ = timeout(FAREWELL, partings.wait_for(Vec::is_empty)).await;
    }

    /// Generate, and give the text as it comes.
    pub fn stream(&self, request: Request) -> TextStream {
        TextStream::generate(self.clone(), request)
    }

    /// Go on with a durable generation after the event with this number; 0 begins at its first.
    pub fn resume(&self, generation_id: impl Into<String>, after_sequence: u64) -> TextStream {
        TextStream::resume(self.clone(), ResumeRequest { generation_id: generation_id.into(), after_sequence })
    }

    /// Generate, and give all of it at the end.
    pub async fn generate(&self, request: Request) -> Result<Generation, Error> {
        let client = match request.priority {
            Some(priority) => self.with_priority(priority),
            None => self.clone(),
        };
        let (message, deadline) = (complete_request(request), client.deadline());
        let mut call = client.repeated(deadline, |transport| complete(transport, message.clone())).await?;
        let answered = async {
            let answer = call.message().await?;
            call.trailers().await?;
            Ok::<_, Status>(answer)
        };
        let answer = client.bounded(deadline, answered).await?.ok_or_else(Error::stream_cut)?;
        let finished = answer.finished.unwrap_or_default();
        Ok(Generation {
            text: answer.text,
            tokens: answer.tokens,
            finish_reason: finished.finish_reason(),
            matched_stop: finished.matched_stop,
            stats: finished.stats.unwrap_or_default(),
            started: answer.started.unwrap_or_default(),
        })
    }

    /// End a generation by the caller's name for it. One that does not run (any more) is not an error.
    pub async fn abort(&self, request_id: impl Into<String>) -> Result<AbortResponse, Error> {
        self.abort_target(Target::RequestId(request_id.into())).await
    }

    /// End a generation by the server's id of it. One that does not run (any more) is not an error.
    pub async fn abort_generation(&self, generation_id: impl Into<String>) -> Result<AbortResponse, Error> {
        self.abort_target(Target::GenerationId(generation_id.into())).await
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
        self.repeated(self.deadline(), made).await.map(Response::into_inner)
    }

    /// Make a call of the AdminService, once: `client.admin(|mut stub| async move { stub.drain(request).await })`.
    pub async fn admin<T, F>(&self, call: impl FnOnce(AdminServiceClient<Transport>) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let deadline = self.deadline();
        let answered = async {
            let transport = self.transport(Some(deadline)).await;
            call(AdminServiceClient::new(transport).max_decoding_message_size(MESSAGE_LIMIT_BYTES)).await
        };
        self.bounded(deadline, answered).await.map(Response::into_inner)
    }

    /// Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness.
    pub async fn health(&self, service: &str) -> Result<&'static str, Error> {
        let deadline = self.deadline();
        let request = HealthCheckRequest { service: service.to_owned() };
        let answered = async { HealthClient::new(self.transport(Some(deadline)).await).check(request).await };
        Ok(self.bounded(deadline, answered).await?.get_ref().status().as_str_name())
    }

    /// Follow the health of a service, its status now first, for as long as `more` says so. It has no deadline.
    pub async fn watch_health(&self, service: &str, mut more: impl FnMut(&'static str) -> bool) -> Result<(), Error> {
        let request = HealthCheckRequest { service: service.to_owned() };
        let mut stub = HealthClient::new(self.transport(None).await);
        let failed = |status: Status| self.error(&status, None);
        let mut statuses = stub.watch(request).await.map_err(failed)?.into_inner();
        while let Some(status) = statuses.message().await.map_err(failed)? {
            if !more(ServingStatus::try_from(status.status).unwrap_or(ServingStatus::Unknown).as_str_name()) {
                break;
            }
        }
        Ok(())
    }

    pub(crate) fn with_priority(&self, priority: i32) -> Self {
        let mut metadata = self.metadata.as_ref().clone();
        metadata.insert("mlx-stream-priority", priority.into());
        Self { metadata: metadata.into(), ..self.clone() }
    }

    pub(crate) fn streams(&self) -> &Streams {
        &self.streams
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout.min(NO_DEADLINE)
    }

    pub(crate) async fn generations(&self, deadline: Instant) -> GenerationServiceClient<Transport> {
        generations(self.transport(Some(deadline)).await)
    }

    pub(crate) fn error(&self, status: &Status, generated_tokens: Option<u32>) -> Error {
        Error::of(status, &self.target, self.timeout, generated_tokens)
    }

    /// Tell the server, in the background, of a durable generation that nobody reads any more.
    pub(crate) fn part(&self, generation: Target, runtime: &Handle) {
        let client = self.with_timeout(FAREWELL);
        self.partings.send_modify(|left| left.push(generation.clone()));
        runtime.spawn(async move {
            let _ = client.abort_target(generation.clone()).await;
            client.partings.send_modify(|left| left.retain(|one| *one != generation));
        });
    }

    /// Wait until a generation that was left is ended: a farewell that comes late would end what is resumed.
    pub(crate) async fn has_parted(&self, generation_id: &str) {
        let generation = Target::GenerationId(generation_id.to_owned());
        let _ = self.partings.subscribe().wait_for(|left| !left.contains(&generation)).await;
    }

    async fn abort_target(&self, target: Target) -> Result<AbortResponse, Error> {
        let request = AbortRequest { target: Some(target) };
        let call = |transport| {
            let (mut stub, request) = (generations(transport), request.clone());
            async move { stub.abort(request).await }
        };
        self.repeated(self.deadline(), call).await.map(Response::into_inner)
    }

    /// What the next call runs on, for so long; None: without a deadline.
    async fn transport(&self, deadline: Option<Instant>) -> Transport {
        let headers = Headers { metadata: self.metadata.as_ref().clone(), deadline };
        InterceptedService::new(self.servers.next().await, headers)
    }

    /// Make a call, again while the server has not taken it up and allows it.
    async fn repeated<T, F>(&self, deadline: Instant, call: impl Fn(Transport) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut failures = 0;
        loop {
            let attempt = async { call(self.transport(Some(deadline)).await).await };
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
        match timeout_at(deadline, call).await {
            Ok(answer) => answer.map_err(|status| self.error(&status, None)),
            Err(_) => Err(Error::deadline(self.timeout, 0)),
        }
    }
}

fn generations(transport: Transport) -> GenerationServiceClient<Transport> {
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

/// The request of the unary call: its fields are those of the streaming one.
fn complete_request(request: Request) -> CompleteRequest {
    use {complete_request::Prompt as To, generate_request::Prompt as From};
    let message = request.message;
    let prompt = message.prompt.map(|prompt| match prompt {
        From::Text(text) => To::Text(text),
        From::Tokens(tokens) => To::Tokens(tokens),
        From::Chat(chat) => To::Chat(chat),
    });
    CompleteRequest {
        request_id: message.request_id,
        model: message.model,
        options: message.options,
        delivery: message.delivery,
        prompt,
    }
}
