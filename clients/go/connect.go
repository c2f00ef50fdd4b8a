package mlxstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // health checking of balanced connections
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// DefaultTimeout bounds every call whose context has no deadline of its own.
const DefaultTimeout = 600 * time.Second

// ReadinessService is the name under which health tells whether generations are taken.
const ReadinessService = "mlxstream.v1.GenerationService"

const (
	messageLimitBytes = 64 * 1024 * 1024
	// Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 20 * time.Second
	several          = "mlxstream-several"
)

// A server that is back is not left waiting for the two minutes that gRPC would take.
var reconnecting = backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second}

// Client talks to one server, or to several that serve the same. It is safe for concurrent use.
type Client struct {
	// Timeout bounds every call whose context has no deadline; 0 means no bound. Change it before the first call.
	Timeout time.Duration

	conns   []*grpc.ClientConn // each server by itself, and last, where there are several, all of them by turns
	servers int
	closed  atomic.Bool
	durable sync.Map // of durable streams under way, and of those that were left, until the server was told: a parting
}

// Connect describes a connection in plain text: "HOST:PORT", "unix:PATH", several "HOST:PORT" joined by commas, or another
// target that gRPC knows. Options are gRPC's own, such as [grpc.WithTransportCredentials] for TLS, and [WithBalancing]; a
// [Token] goes into [grpc.WithPerRPCCredentials]. Nothing is sent before the first call. Call [Client.Close] at the end.
func Connect(target string, options ...grpc.DialOption) (*Client, error) {
	client := &Client{Timeout: DefaultTimeout}
	defaults := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(serviceConfig(false)),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(messageLimitBytes), grpc.MaxCallSendMsgSize(messageLimitBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnecting, MinConnectTimeout: 20 * time.Second}),
		grpc.WithChainUnaryInterceptor(client.invoke),
	}
	options = append(defaults, options...)
	targets := strings.Split(target, ",")
	client.servers = len(targets)
	for _, server := range targets {
		if err := checkTarget(server, client.servers > 1); err != nil {
			return nil, err
		}
	}
	if client.servers > 1 {
		options = append(options, listed(targets))
		targets = append(targets, several+":///servers")
	}
	for place, target := range targets {
		if place == client.servers {
			options = append(options, WithBalancing())
		}
		conn, err := grpc.NewClient(target, options...)
		if err != nil {
			return nil, errors.Join(err, client.Close())
		}
		client.conns = append(client.conns, conn)
	}
	return client, nil
}

// WithBalancing sends calls by turns to every server behind the target whose health says that it serves, rather than
// all to one. Several targets, joined by commas, are balanced anyway.
func WithBalancing() grpc.DialOption { return grpc.WithDefaultServiceConfig(serviceConfig(true)) }

// Token is a bearer token, for [grpc.WithPerRPCCredentials]. It goes over plain text too, where servers behind a proxy
// may want it.
type Token string

// GetRequestMetadata presents the token.
func (t Token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if t == "" || strings.ContainsFunc(string(t), func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("mlxstream: a token is made of visible ASCII characters")
	}
	return map[string]string{"authorization": "Bearer " + string(t)}, nil
}

// RequireTransportSecurity says no.
func (t Token) RequireTransportSecurity() bool { return false }

// Generations gives the stubs of the service that generates. (Its streams have neither deadline nor errors of ours.)
func (c *Client) Generations() v1.GenerationServiceClient {
	return v1.NewGenerationServiceClient(c.conn())
}

// Models gives the stubs of the service that tells about models.
func (c *Client) Models() v1.ModelServiceClient { return v1.NewModelServiceClient(c.conn()) }

// Admin gives the stubs of the operators' service.
func (c *Client) Admin() v1.AdminServiceClient { return v1.NewAdminServiceClient(c.conn()) }

func (c *Client) health() healthv1.HealthClient { return healthv1.NewHealthClient(c.conn()) }

func (c *Client) conn() *grpc.ClientConn { return c.conns[len(c.conns)-1] }

// apart gives the stubs of one of the servers by itself, for what only that one may know: a generation.
func (c *Client) apart(server int) v1.GenerationServiceClient {
	return v1.NewGenerationServiceClient(c.conns[server])
}

// invoke makes a call with one answer: it has a deadline, and fails with our errors.
func (c *Client) invoke(
	ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoker grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.failure(invoker(ctx, method, request, answer, conn, options...))
}

// bounded gives ctx a deadline if it has none.
func (c *Client) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has || c.Timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.Timeout)
}

// listed resolves the target of several addresses, each of which has its own name in its certificate.
func listed(addresses []string) grpc.DialOption {
	known, state := manual.NewBuilderWithScheme(several), resolver.State{}
	for _, address := range addresses {
		host, _, _ := net.SplitHostPort(address) // checked before
		state.Addresses = append(state.Addresses, resolver.Address{Addr: address, ServerName: host})
	}
	known.InitialState(state)
	return grpc.WithResolvers(known)
}

// checkTarget refuses what is no target; gRPC would look for a name with the port 443.
func checkTarget(target string, isOneOfSeveral bool) error {
	isNamed := strings.Contains(target, "://") || strings.HasPrefix(target, "unix:") || strings.HasPrefix(target, "dns:")
	if isNamed && !isOneOfSeveral {
		return nil
	}
	if _, port, err := net.SplitHostPort(target); err != nil || port == "" {
		return fmt.Errorf("mlxstream: the target must be HOST:PORT (or alone unix:PATH), not %q", target)
	}
	return nil
}

// serviceConfig says when gRPC tries a call again: only while the server has not taken it up, and at a full server only
// if that says when to come back.
func serviceConfig(balanced bool) string {
	type object = map[string]any
	config := object{"methodConfig": []object{{
		"name": []object{{"service": "mlxstream.v1.GenerationService"}, {"service": "mlxstream.v1.ModelService"}},
		"retryPolicy": object{
			"maxAttempts":          4,
			"initialBackoff":       "0.1s",
			"maxBackoff":           "2s",
			"backoffMultiplier":    2,
			"retryableStatusCodes": []string{"UNAVAILABLE", "RESOURCE_EXHAUSTED"},
		},
	}}}
	if balanced {
		config["loadBalancingConfig"] = []object{{"round_robin": object{}}}
		config["healthCheckConfig"] = object{"serviceName": ReadinessService}
	}
	text, err := json.Marshal(config)
	if err != nil {
		panic(err) // a constant
	}
	return string(text)
}
